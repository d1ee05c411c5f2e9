# SPDX-License-Identifier: Apache-2.0
"""Operands that a compiler fuses into its kernels: the bits of those that kernels make, on the host and on a GPU."""

import pytest
import torch

from fmtsim.formats.block import E8M0, BlockFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers import compile, multiply
from fmtsim.gemm.layers import quantize_operand as operands
from fmtsim.gemm.layers.compile import quantizer_digest
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import Layer
from fmtsim.recipes import get_recipe
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling import scales
from fmtsim.scaling.inlined import _scales, covers, inlined
from fmtsim.spec.quantizer import Hadamard, Quantizer
from tests.support.bits import assert_same_bits
from tests.support.operands import bfloat16s, normal

SIDE = 256
CASES = [
    ("te_mxfp8", "x_f"), ("ao_mxfp8_floor", "x_f"), ("ao_mxfp8_even", "x_f"), ("mxfp4", "x_f"), ("te_current", "g_d"),
    ("ao_tensorwise", "x_f"), ("ao_rowwise", "x_f"), ("deepseek_v3", "x_f"), ("deepseek_v3", "w_f"),
    ("te_block", "w_f"), ("te_nvfp4", "x_f"), ("te_nvfp4", "w_f"),
]  # fmt: skip


def quantizer_of(recipe, name):
    return get_recipe(recipe).linear.operands[name]


E4M3, MXFP8 = get_format("e4m3"), get_format("mxfp8_e4m3")
OTHERS = [
    Quantizer(),
    Quantizer(format="e4m3"),
    Quantizer(format="int8", scaling=Scaling()),
    quantizer_of("quartet2", "x_f"),
    Quantizer(format=MXFP8, rounding=Rounding(mode="stochastic")),
    Quantizer(format=MXFP8, overflow="ieee"),
    Quantizer(format=MXFP8, transforms=(Hadamard(size=32),)),
    Quantizer(format=MXFP8, then=Quantizer(format=MXFP8)),
    Quantizer(format="e2m1", scaling=Scaling()),
    *(Quantizer(format=E4M3, scaling=Scaling(**rule)) for rule in (
        {"arithmetic": "divide"}, {"offset": 1.0}, {"eps": 1.0, "eps_rule": "sum"}, {"power_of_two": "log2"},
        {"statistic": "std"}, {"scale": get_format("e4m3")}, {"candidates": (1.0, 0.5)}, {"multiplier": 3.0},
    )),
]  # fmt: skip


@pytest.fixture
def on_gpu(device, monkeypatch):
    """Let a CPU give what a GPU does, by the casts of its own engine."""
    if device.type == "cpu":
        for module in (operands, compile, multiply):
            monkeypatch.setattr(module, "is_on_gpu", lambda t: t.dtype != torch.float64)
        with torch.library._scoped_library("aten", "IMPL") as library:  # which torch has for GPUs alone
            library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
            yield device
    else:
        yield device


def matrices(device):
    """Yield all numbers of bfloat16, numbers of float32 of all sizes, and blocks of zeros, Inf and NaN."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(SIDE * SIDE, generator=generator)
    yield torch.arange(SIDE * SIDE).to(torch.int16)[order].view(torch.bfloat16).view(SIDE, SIDE).float().to(device)
    patterns = torch.randint(-(2**31), 2**31, (SIDE, SIDE), generator=generator).to(torch.int32)
    yield patterns.view(torch.float32).nan_to_num(1.0).to(device)
    for power in (-140, -120, 0, 120):
        yield (normal(SIDE, SIDE, seed=power + 200) * 2.0**power).to(device)
    special = normal(SIDE, SIDE, seed=3)
    special[:128, :128], special[128:160], special[160:192, :32], special[:, 200] = -0.0, torch.inf, torch.nan, 0.0
    special[0, 0], special[1, 40], special[2, 70] = torch.inf, -torch.inf, -torch.nan
    yield special.to(device)
    yield (torch.randint(-480, 481, (SIDE, SIDE), generator=generator) / 16).to(device)  # ties


def parts(made):
    """Return the tensors of an operand; every NaN is the same one."""
    found = [t for t in (made.elements, made.scale, made.tensor_scale) if t is not None]
    return [torch.where(t.isnan(), torch.nan, t) for t in found]


WAYS = ((-1, torch.bfloat16), (0, torch.float32), (-1, torch.float32), (0, torch.bfloat16))
OPERANDS = [  # one of the first two ways in turn; all of them are slow
    pytest.param(*case, *way, marks=() if j == i % 2 else pytest.mark.slow)
    for i, case in enumerate(CASES) for j, way in enumerate(WAYS)
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "name", "dim", "dtype"), OPERANDS, ids=str)
def test_operands_are_those_of_kernels(recipe, name, dim, dtype, on_gpu):
    quantizer = quantizer_of(recipe, name)
    for x in matrices(on_gpu):
        x = x.to(dtype)
        found, expected = inlined(x, quantizer, dim), operands.quantize_operand(x, quantizer, dim=dim, folded=True)
        assert found.block == expected.block or expected.scale is None
        for one, other in zip(parts(found), parts(expected), strict=True):
            assert one.stride() == other.stride()
            assert_same_bits(one, other)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize(
    "cases",
    [(CASES[0], CASES[4], CASES[11]), pytest.param(CASES[1:4] + CASES[5:11], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_compilers_change_no_bits(cases, on_gpu):
    """Whatever computes a matrix is part of the same kernels, and what multiplies a product."""
    from torch._inductor.utils import run_and_get_code  # late: it imports much

    texts = [quantizer_digest(quantizer_of(*case)) for case in cases]
    fused, finish = torch.ops.fmtsim.fused_operand, torch.ops.fmtsim.fused_finish

    def run(x, y, column, row):
        t = (x * y).to(torch.bfloat16)
        products = [finish(x, column, row, dtype) + y for dtype in (torch.bfloat16, torch.float32)]
        return [*(part for text in texts for dim in (-1, 0) for part in fused(t, dim, text)), *products]

    y = 1 + normal(SIDE, SIDE, seed=9, device=on_gpu).abs()
    rest = y, y[:1].mT.contiguous(), y[:, :1].contiguous()
    # Compiled anew, but for what the compiler finds out of the processor, which takes longer than all of this.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(run, fullgraph=True)
        _, code = run_and_get_code(compiled, y.clone(), *rest)
    lines = [line for line in "".join(code).splitlines() if not line.lstrip().startswith("#")]
    assert any("async_compile" in line for line in lines)
    assert not any("torch.ops.fmtsim" in line for line in lines)  # neither operator is called
    for x in matrices(on_gpu):
        for one, other in zip(compiled(x, *rest), run(x, *rest), strict=True):
            assert_same_bits(one.nan_to_num(0.5), other.nan_to_num(0.5))


def test_scales_of_exponents_are_those_of_all_engines():
    bits = torch.arange(0x7F800000 >> 21).to(torch.int32) << 21
    bits = torch.cat([bits + near for near in range(-3, 4)] + [torch.arange(1, 1 << 12, dtype=torch.int32)])
    bits = bits.clamp(0, 0x7F7FFFFF)
    for rule in ("floor", "ceil", "rceil", "even"):
        for name in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2"):
            element = get_format(name)
            found = _scales(bits, Scaling(exponent_rule=rule), element)
            fmt = BlockFormat("of a rule", element, Scaling(exponent_rule=rule, scale=E8M0))
            expected = scales.exponent_scales(bits.view(torch.float32), fmt)
            assert_same_bits(found.scale, expected.scale)
            assert_same_bits(found.factor, torch.exp2(-expected.exponent.double()).float())


def test_quotients_of_compiled_code_are_rounded_once():
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(0, 0x7F800000, (2, 1 << 20), generator=generator).to(torch.int32)
    bits[1, ::2] = (bits[0, ::2] + bits[1, ::2] % 5 - 2).clamp(min=1)  # quotients next to one
    a, b = bits.clamp(min=1).view(torch.float32)
    assert_same_bits(scales.quotient64(a, b), torch.div(a, b))


@pytest.mark.parametrize("quantizer", OTHERS, ids=str)
def test_other_quantisers_are_left_to_kernels(quantizer):
    assert not covers(bfloat16s(SIDE, SIDE), quantizer, -1)


def test_other_matrices_are_left_to_kernels():
    quantizer, x = quantizer_of("te_mxfp8", "x_f"), bfloat16s(SIDE, SIDE)
    assert covers(x, quantizer, 0)
    for other in (x[:, :48].contiguous(), x.mT, x[:0], x.half(), x.double()):
        assert not covers(other, quantizer, -1)
    assert not covers(x[:48], quantizer, 0) and covers(x[:48], quantizer, -1)


def check_compiled_layer(recipe, device, rows):
    """Compare a compiled layer with an eager one for some numbers of rows; return the operators that it calls."""
    from torch._dynamo.backends.common import aot_autograd  # late: it imports much

    called = set()

    def noted(graph, _):
        names = (str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        called.update(name.split(".")[1] for name in names if name.startswith("fmtsim."))
        return graph.forward

    layer = Layer(get_recipe(recipe).linear, 3)
    eager = lambda x, w: run_layer(x, w, None, layer)  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, backend=aot_autograd(fw_compiler=noted))
    for count in rows:
        sizes = (count, 64), (96, 64), (count, 96)
        x, w, g = (bfloat16s(*size, seed=i, device=device) for i, size in enumerate(sizes))
        leaves = x.requires_grad_(), w.requires_grad_()
        expected, found = ([y := f(*leaves), *torch.autograd.grad(y, leaves, g)] for f in (eager, compiled))
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
    return called - {"draw_key"}


@pytest.mark.filterwarnings("ignore")  # of the compiler and of autograd
@pytest.mark.parametrize(
    ("recipe", "called"),
    [
        ("te_mxfp8", {"fused_operand"}), ("te_current", {"fused_operand", "fused_finish"}),
        ("mxfp4", {"fused_operand", "quantize_operand"}),
        ("te_nvfp4", {"fused_operand", "fused_finish", "quantize_operand"}),
    ],
)  # fmt: skip
def test_compiled_layers_have_fused_operators_where_they_can(recipe, called, on_gpu):
    assert check_compiled_layer(recipe, on_gpu, [128]) == called


@pytest.mark.filterwarnings("ignore")  # of the compiler and of autograd
def test_sizes_that_a_compiler_does_not_know_are_left_to_kernels(on_gpu):
    """Steps are made for sizes; the second number of rows is any."""
    assert "finish" in check_compiled_layer("te_current", on_gpu, [128, 64, 96])
