"""What scaled_mm refuses, and what it says then."""

import pytest
import torch
from torch.nn.functional import ScalingType

import fmtsim
from fmtsim import ArgumentError, DtypeError, GemmPlan
from tests.support.operands import e4m3_pair

WGMMA, ONE = "hopper.wgmma", torch.tensor(1.0)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

A, B = e4m3_pair(16, 16, 32)
BT = B.t()
HALF, BRAIN = torch.ones(16).half(), torch.ones(16).bfloat16()
MX = torch.full((16, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
OUT = {"unit": WGMMA, "out_dtype": torch.bfloat16}


def run(*arguments, **options):
    return lambda: fmtsim.scaled_mm(*arguments, **(options if "target" in options else OUT | options))


REFUSED = {
    "no machine": (lambda: fmtsim.scaled_mm(A, BT, ONE, ONE), ArgumentError,
                   "scaled_mm needs a target or a unit; pass one of"),
    "no tensor": (run([1], BT, ONE, ONE), DtypeError, "a is list, not a tensor"),
    "dimensions": (run(A[0], BT, ONE, ONE), ArgumentError, r"a has shape \(32,\); pass a tensor of 2 dimensions"),
    "K": (run(A, A, ONE, ONE), ArgumentError, r"a of shape \(16, 32\) and b of shape \(16, 32\) do not fit"),
    "device": (run(A, BT.to("meta"), ONE, ONE), ArgumentError, "a is on cpu, b on meta"),
    "scale device": (run(A, BT, ONE.to("meta"), ONE), ArgumentError, "a is on cpu, scale_a on meta"),
    "pair": (run(A, BT.to(torch.bfloat16), ONE, ONE), ArgumentError, "unit hopper.wgmma does not take e4m3 x bf16"),
    "scale": (run(A, BT, 1.0, ONE), DtypeError, "scale_a is float, not a tensor; pass scales, and recipes as"),
    "torch's other order": (run(A, BT, ONE, ScalingType.TensorWise, ONE, ScalingType.TensorWise), DtypeError,
        "recipes as scale_recipe_a="),
    "scale dtype": (run(A, BT, ONE.double(), ONE), DtypeError, "scale_a has dtype torch.float64; pass torch.float32"),
    "scale shapes": (run(A, BT, torch.ones(16), torch.ones(16)), ArgumentError,
                     r"scale_a of shape \(16,\) and scale_b of shape \(16,\) fit no kind of scaling; pass one element"),
    "NaN": (run(A, BT, ONE * torch.nan, ONE), ArgumentError, "scale_a holds nan; scales are finite and not negative"),
    "Inf": (run(A, BT, ONE, ONE * torch.inf), ArgumentError, "scale_b holds inf; scales are finite"),
    "negative": (run(A, BT, torch.ones(16, 1), -torch.ones(1, 16)), ArgumentError,
        "scale_b holds -1; scales are finite"),
    "one recipe": (run(A, BT, ONE, ONE, scale_recipe_a="RowWise"), ArgumentError,
        "scale_recipe_a and scale_recipe_b belong"),
    "unknown recipe": (run(A, BT, ONE, ONE, scale_recipe_a="Row", scale_recipe_b="Row"), ArgumentError,
                       "scale_recipe_a='Row' is not a ScalingType; choose one of TensorWise, RowWise"),
    "unknown swizzle": (run(A, BT, MX, MX, swizzle_a="32"), ArgumentError, "swizzle_a='32' is not a SwizzleType"),
    "mixed recipes": (run(A, BT, ONE, torch.ones(1, 16), scale_recipe_a="TensorWise", scale_recipe_b="RowWise"),
        ArgumentError,
                      "scaling TensorWise x RowWise does not exist"),
    "large blocks": (run(A, BT, ONE[None, None], ONE[None, None], scale_recipe_a="BlockWise128x128",
                         scale_recipe_b="BlockWise128x128"), ArgumentError,
                         "scaling BlockWise128x128 x BlockWise128x128"),
    "tensor recipe": (run(A, BT, torch.ones(2), ONE, scale_recipe_a="TensorWise", scale_recipe_b="TensorWise"),
        ArgumentError,
                      r"scale_a has shape \(2,\); a tensor-wise scale has one element"),
    "row recipe": (run(A, BT, torch.ones(16, 1), torch.ones(16, 1), scale_recipe_a="RowWise", scale_recipe_b="RowWise"),
                   ArgumentError, r"scale_b has shape \(16, 1\); row-wise scales have shape \(1, 16\)"),
    "block recipe": (run(A, BT, torch.ones(15, 1), ONE[None, None], scale_recipe_a="BlockWise1x128",
                         scale_recipe_b="BlockWise128x128"), ArgumentError,
                     r"scale_a has shape \(15, 1\); BlockWise1x128 scales have shape \(16, 1\) or \(1, 16\)"),
    "MX dtype": (run(A, BT, ONE, ONE, scale_recipe_a="BlockWise1x32", scale_recipe_b="BlockWise1x32"), DtypeError,
                 "scale_a has dtype torch.float32; BlockWise1x32 scales are torch.float8_e8m0fnu"),
    "MX size": (run(A, BT, MX, MX), ArgumentError, r"scale_a has 16 elements; 512 are wanted: \[16, 1\] padded to"),
    "MX plain size": (run(A, BT, MX[:5], MX, swizzle_a="NO_SWIZZLE"), ArgumentError, r"without swizzle pass \(16, 1\)"),
    "MX unit": (run(A, BT, MX, MX, swizzle_a="NO_SWIZZLE", swizzle_b="NO_SWIZZLE"), ArgumentError,
                "unit hopper.wgmma does not take e4m3 x e4m3 with e8m0 scales"),
    "MX and NVFP4": (run(A, BT, MX, A[:, :1]), DtypeError, "scale_a and scale_b have different dtypes"),
    "MX twice": (run(A, BT, [MX, ONE], [MX, ONE], swizzle_a="NO_SWIZZLE", swizzle_b="NO_SWIZZLE"), ArgumentError,
                 "scale_a is a list of 2; BlockWise1x32 takes fewer scales"),
    "bias shape": (run(A, BT, ONE, ONE, BRAIN[:5]), ArgumentError, r"bias has shape \(5,\); pass \[16\]"),
    "bias dtype": (run(A, BT, ONE, ONE, HALF), DtypeError,
                   "bias has dtype torch.float16; a torch.bfloat16 output takes torch.bfloat16"),
    "bias of FP8": (run(A, BT, ONE, ONE, HALF.float(), out_dtype=E4M3), DtypeError,
        "takes torch.bfloat16 or torch.float16"),
    "result scale": (run(A, BT, ONE, ONE, None, torch.ones(2)), ArgumentError, "pass one float32 element"),
    "out": (run(A, BT, ONE, ONE, out_dtype=torch.float4_e2m1fn_x2), DtypeError, "is not the dtype of a product"),
    "gradient": (run(A, BT, ONE, ONE, BRAIN.clone().requires_grad_()), ArgumentError,
                 "scaled_mm has no gradient, but bias requires one; pass bias.detach()"),
    "plan": (run(A, BT, ONE, ONE, plan=GemmPlan(promote_every=128, scaled_promotion=True)), ArgumentError,
             "a plan with scaled_promotion=True does not fit scaling 'tensor'"),
    "promotion": (run(A, BT, torch.ones(16, 1), ONE[None, None], plan=GemmPlan(promote_every=64, scaled_promotion=True),
                      scale_recipe_a="BlockWise1x128", scale_recipe_b="BlockWise128x128"), ArgumentError,
                  "promote_every=64 does not fit scales of 128 products; choose 128"),
    "tiles": (run(A, BT, torch.ones(16, 1), ONE[None, None], scale_recipe_a="BlockWise1x128",
                  scale_recipe_b="BlockWise128x128",
                  plan=GemmPlan(promote_every=128, scaled_promotion=True, k_tile=64)), ArgumentError,
              "k_tile=64 does not hold whole chains of 128 products"),
}  # fmt: skip
WIDE_A, E5 = torch.ones(16, 24).to(E4M3), torch.ones(16, 32).to(E5M2)
PACKED = torch.zeros(16, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
LIBRARY = {
    "e5m2": (run(E5, E5.t(), ONE, ONE, target="x", out_dtype=torch.float32), DtypeError,
        "cuBLAS does not multiply e5m2 by e5m2"),
    "e5m2 out": (run(A, BT, ONE, ONE, target="x", out_dtype=E5M2), DtypeError,
        "cuBLAS has no e5m2 output for e4m3 by e4m3"),
    "bf16": (run(A.bfloat16(), BT.bfloat16(), ONE, ONE, target="x", out_dtype=torch.float32), DtypeError,
             "torch._scaled_mm takes 8-bit and 4-bit operands, not bf16 x bf16; call mm"),
    "K": (run(WIDE_A, WIDE_A.t(), ONE, ONE, target="x"), ArgumentError,
        "multiples of 16, not K=24, N=16; pad, or pass unit="),
    "N": (run(A, BT[:, :5], ONE, ONE, target="x"), ArgumentError, "not K=32, N=5"),
    "bias": (run(A, BT, ONE, ONE, BRAIN, out_dtype=torch.float32, target="x"), DtypeError,
             "torch._scaled_mm adds no bias to a float32 output"),
    "fast": (run(PACKED, PACKED.t(), *[torch.zeros(512, dtype=torch.uint8).view(E4M3)] * 2, out_dtype=torch.bfloat16,
                 use_fast_accum=True, target="x"), ArgumentError,
                 "no use_fast_accum for 4-bit operands; leave it False"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*REFUSED, *(f"library: {name}" for name in LIBRARY)])
def test_refusals(notebook, case):
    call, error, message = LIBRARY[case[9:]] if case.startswith("library: ") else REFUSED[case]
    with pytest.raises(error, match=message):
        call()
