# SPDX-License-Identifier: Apache-2.0
"""Casts, products, optimizer steps and trainings that people run most: ``fmtsim warmup`` compiles what they need."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fmtsim.casts.quantize import encode, quantize
from fmtsim.gemm.products.matmul import int_mm, mm
from fmtsim.gemm.targets.doubts import collected_guesses
from fmtsim.lab.analysis.observe import observe
from fmtsim.nn.convert import convert
from fmtsim.optim import AdamW
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.plan import GemmPlan

NEAREST = ("e4m3", "e5m2", "e4m3fnuz", "e3m4", "e3m2", "e2m3", "e2m1", "e5m6", "e8m0", "fp16", "bf16", "tf32", "nf4",
           "bnb_dynamic8", "mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "nvfp4", "int8_channel", "int4_g128")  # fmt: skip
STOCHASTIC = ("e4m3", "e5m2", "e2m1", "bf16", "fp16", "mxfp4")
ENCODED = ("e4m3", "e5m2", "int8", "bnb_dynamic8", "bf16", "e2m1", "nf4", "mxfp8_e4m3", "int8_channel", "int4_g128",
           "mxfp4", "nvfp4")  # fmt: skip
DECODED = ("bf16", "mxfp8_e4m3")  # of each a format: codes of elements, and of blocks
STATES = ("fp32", "bnb8", "coat")
TRAININGS = (("te_current", None), ("te_mxfp8", None), ("quartet", None), ("te_current", "h200"),
             ("te_mxfp8", "recipe"), ("te_nvfp4", "recipe"))  # fmt: skip
SPLIT, PROMOTED = GemmPlan(k_tile=128, split=4), GemmPlan(promote_every=128)
PRODUCTS: tuple[tuple[torch.dtype, Any, GemmPlan | None], ...] = (
    (torch.float8_e4m3fn, "hopper.wgmma", None), (torch.float8_e4m3fn, "hopper.wgmma", PROMOTED),
    (torch.float8_e4m3fn, "hopper.wgmma", SPLIT), (torch.float8_e4m3fn, "blackwell.tcgen05", None),
    (torch.float8_e4m3fn, "ada.mma", None), (torch.bfloat16, "hopper.wgmma", None),
    (torch.bfloat16, "hopper.wgmma", PROMOTED), (torch.bfloat16, "hopper.wgmma", SPLIT),
    (torch.bfloat16, "cdna3.mfma", None), (torch.bfloat16, "exact", None), (torch.float16, "hopper.wgmma", None),
    (torch.float16, "ampere.mma", None), (torch.float16, "volta.mma", None), (torch.float32, "hopper.wgmma", None),
    (torch.float32, "fp32_fma", None), (torch.bfloat16, Datapath(block=64, fraction_bits=20), None),
    (torch.bfloat16, Datapath(term_rounding="nearest_even", rounding="nearest_even"), None),  # type: ignore[arg-type]
)  # fmt: skip


def usual_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls, each of small tensors on the CPU."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for name in NEAREST:
        yield f"cast {name}", partial(quantize, x, name, out=torch.empty_like(x))
    for name in STOCHASTIC:
        yield f"cast {name} stochastic", partial(quantize, x, name, rounding="stochastic", generator=0)
    for name in ENCODED:
        yield f"encode {name}", partial(encode, x, name)
    for name in DECODED:
        yield f"decode {name}", encode(x, name).decode
    for state in STATES:
        yield f"optimizer {state}", partial(_optimize, state)
    for recipe, target in TRAININGS:
        yield f"training {recipe}" + (f" on {target}" if target else ""), partial(_train, recipe, target)
    for dtype, target, plan in PRODUCTS:
        yield f"product {dtype} on {target}", partial(_multiply, dtype, target, plan)
    yield "product int8", partial(int_mm, x.char(), x.char().t(), target="int8")


def _multiply(dtype: torch.dtype, target: Any, plan: GemmPlan | None) -> None:
    a = torch.ones(64, 128).to(dtype)
    tf32 = dtype == torch.float32 and target != "fp32_fma"
    mm(a, a.t(), out_dtype=torch.float32, target=target, plan=plan, allow="tf32" if tf32 else None)


def _optimize(state: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(64, 64))
    parameter.grad = torch.ones(64, 64)
    AdamW([parameter], state=state).step()


def _train(recipe: str, target: str | None) -> None:
    """Run one step of two layers forward and backward, observed; the second one stands for a head."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 64))
    model = convert(model, recipe=recipe, target=target)
    with observe(model), collected_guesses():  # a warning about a guessed plan is for the calls of users
        model(torch.ones(128, 128)).sum().backward()
