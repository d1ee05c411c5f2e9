# SPDX-License-Identifier: Apache-2.0
"""mm, bmm, linear, int_mm and mma: bits, layouts, formats, gradients, compilation and every refusal."""

from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim import Datapath, FmtsimError, GemmPlan, RandomKey, get_format, get_unit
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits
from tests.support.gemm_oracle import definition as spec
from tests.support.gemm_oracle import finished, sums
from tests.support.operands import normal, wide
from tests.support.refusals import refused

WGMMA = "hopper.wgmma"
STOCHASTIC = Datapath(accumulator="bf16", rounding="stochastic")
# torch.compile instantiates an autograd function, and torch warns of that and of its scripting itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning"),
]


def product(a, b, dtype, *arguments, bias=None, **options):
    """Return the oracle's ``a b`` for b [K, N]."""
    return finished(sums(a, b.mT, spec(*arguments, **options)), dtype, bias=bias)


def pair(m=5, n=6, k=40, dtype=torch.bfloat16):
    return wide(m, k, seed=1).to(dtype), wide(k, n, seed=2).to(dtype)


# Bits.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("out", [None, torch.float32, torch.float64, torch.float8_e4m3fn], ids=str)
def test_mm_has_the_bits_of_the_oracle(dtype, out):
    a, b = pair(dtype=dtype)
    a[0, 0], b[0, 1], a[1, 1] = torch.nan, torch.inf, -torch.inf
    name = str(dtype).removeprefix("torch.")
    got = fmtsim.mm(a, b, target=WGMMA, out_dtype=out)
    expected = finished(sums(a, b.mT, spec(name)), out or dtype)
    assert_same_bits(got, expected)


def test_layouts_change_no_bit():
    a, b = pair(8, 6, 40)
    expected = fmtsim.mm(a, b, target=WGMMA)
    big = torch.zeros(16, 80, dtype=a.dtype)
    big[::2, ::2] = a
    for left in (a, a.mT.contiguous().mT, big[::2, ::2]):
        for right in (b, b.mT.contiguous().mT, b.flip(0).flip(0)):
            assert_same_bits(fmtsim.mm(left, right, target=WGMMA), expected)
    row = a[:1].expand(8, 40)  # a stride of 0
    assert_same_bits(fmtsim.mm(row, b, target=WGMMA), expected[:1].expand(8, 6))


def test_batches_have_the_bits_of_mm():
    a, b = normal(3, 5, 40, seed=1).bfloat16(), normal(3, 40, 6, seed=2).bfloat16()
    for left, right in ((a, b), (a.mT.contiguous().mT, b.expand(3, 40, 6)), (a[:1].expand(3, 5, 40), b)):
        together = fmtsim.bmm(left, right, target=WGMMA, out_dtype=torch.float32)
        for i in range(3):
            assert_same_bits(together[i], fmtsim.mm(left[i], right[i], target=WGMMA, out_dtype=torch.float32))
    drawn = fmtsim.bmm(a, b, target=STOCHASTIC, generator=7)
    for i in range(3):
        assert_same_bits(drawn[i], fmtsim.mm(a[i], b[i], target=STOCHASTIC, generator=RandomKey(7, i)))


@pytest.mark.parametrize("shape", [(40,), (5, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40), (2, 0, 40)])
def test_linear_takes_any_leading_dimensions(shape):
    x, w, bias = normal(*shape, seed=1).bfloat16(), normal(6, 40, seed=2).bfloat16(), normal(6, seed=3).bfloat16()
    for added in (None, bias):
        y = fmtsim.linear(x, w, added, target=WGMMA)
        assert y.shape == (*shape[:-1], 6) and y.dtype == torch.bfloat16
        if x.numel():
            assert_same_bits(y.reshape(-1, 6), product(x.reshape(-1, 40), w.mT, torch.bfloat16, "bf16", bias=added))


def test_empty_products():
    a, b = torch.ones(3, 0, dtype=torch.bfloat16), torch.ones(0, 4, dtype=torch.bfloat16)
    assert_same_bits(fmtsim.mm(a, b, target=WGMMA), torch.zeros(3, 4, dtype=torch.bfloat16))
    assert fmtsim.mm(a[:0], b, target=WGMMA).shape == (0, 4)
    assert fmtsim.mm(a, b[:, :0], target=WGMMA).shape == (3, 0)
    assert fmtsim.bmm(a.expand(0, 3, 0), b.expand(0, 0, 4), target=WGMMA).shape == (0, 3, 4)
    assert_same_bits(
        fmtsim.linear(a, b.mT, torch.ones(4).bfloat16(), target=WGMMA), torch.ones(3, 4, dtype=torch.bfloat16)
    )
    for shape in ((3, 1, 0), (1, 3, 0), (2, 3, 0), (0,)):
        assert fmtsim.linear(torch.ones(shape).bfloat16(), b.mT, target=WGMMA).shape == (*shape[:-1], 4)


def test_tf32_rounds_to_nearest_even():
    a, b = pair(dtype=torch.float32)
    a[0, 0], a[1, 0] = 1 + 2.0**-11, 1 + 3 * 2.0**-11  # ties
    rounded = [fmtsim.quantize(x, "tf32", overflow="ieee") for x in (a, b)]
    got = fmtsim.mm(a, b, target=WGMMA, allow="tf32")
    assert_same_bits(got, product(*rounded, torch.float32, "tf32"))
    assert_same_bits(got, fmtsim.mm(*rounded, target=WGMMA, formats="tf32"))


def test_plans_and_accumulators():
    a, b = pair(k=96, dtype=torch.float16)
    plan = GemmPlan(k_tile=32, split=2)
    assert_same_bits(fmtsim.mm(a, b, target=WGMMA, plan=plan), product(a, b, torch.float16, "fp16", plan=plan))
    half = fmtsim.mm(a, b, target=WGMMA, allow="fp16_accumulation")
    assert_same_bits(half, product(a, b, torch.float16, "fp16", accumulate="fp16"))
    assert_same_bits(half, fmtsim.mm(a, b, target=WGMMA, accumulate="fp16"))
    assert not torch.equal(half, fmtsim.mm(a, b, target=WGMMA))
    brain = a.bfloat16(), b.bfloat16()  # torch's switch does not concern bfloat16
    assert_same_bits(fmtsim.mm(*brain, target=WGMMA, allow="fp16_accumulation"), fmtsim.mm(*brain, target=WGMMA))


def test_float64():
    a, b = wide(4, 9, seed=1).double() * (1 + 2.0**-45), wide(9, 3, seed=2).double() * (1 - 2.0**-44)
    expected = finished(sums(a, b.mT, spec("fp64", unit="fp64_fma"), torch.float64), torch.float64)
    assert_same_bits(fmtsim.mm(a, b, target="fp64_fma"), expected)
    assert_same_bits(fmtsim.mm(a, b, target="hopper.mma"), expected)


def test_a_float64_result_holds_the_accumulators_values():
    a = torch.tensor([[1.0, 2.0**-13]], dtype=torch.float16)
    results = [
        fmtsim.mm(a, a.t(), target="exact", out_dtype=torch.float64, accumulate=x) for x in (None, "fp32", "fp64")
    ]
    assert [y.item() - 1 for y in results] == [0.0, 0.0, 2.0**-26]
    assert "rounded once to float32, or to float64 (fp64)" in get_unit("exact").description


def test_own_datapath_and_random_words():
    a, b = pair()
    assert_same_bits(fmtsim.mm(a, b, target=Datapath(block=4, fraction_bits=10)),
         product(a, b, torch.bfloat16, "bf16", unit=Datapath(block=4, fraction_bits=10)))  # fmt: skip
    expected = finished(sums(a, b.mT, spec("bf16", unit=STOCHASTIC), random=RandomKey(11)), torch.bfloat16)
    assert_same_bits(fmtsim.mm(a, b, target=STOCHASTIC, generator=11), expected)
    generator = torch.Generator().manual_seed(5)
    drawn = fmtsim.mm(a, b, target=STOCHASTIC, generator=generator)
    assert not torch.equal(drawn, fmtsim.mm(a, b, target=STOCHASTIC, generator=generator))
    assert_same_bits(drawn, fmtsim.mm(a, b, target=STOCHASTIC, generator=torch.Generator().manual_seed(5)))
    torch.manual_seed(9)
    default = fmtsim.mm(a, b, target=STOCHASTIC)
    torch.manual_seed(9)
    assert_same_bits(default, fmtsim.mm(a, b, target=STOCHASTIC))


# Formats.


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e2m3", "e3m2", "e2m1"])
def test_values_codes_and_torchs_own_dtypes_are_the_same_operand(name):
    fmt = get_format(name)
    unit = "cdna3.mfma" if name == "e4m3fnuz" else "blackwell.tcgen05"
    codes = torch.randint(0, 1 << fmt.bits, (6, 32), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    values = fmtsim.decode(codes, name)
    expected = sums(values, values, spec(name, unit=unit))
    formats = {"formats": name}
    assert_same_bits(fmtsim.mm(codes, codes.mT, target=unit, **formats), expected)
    assert_same_bits(fmtsim.mm(values, values.mT, target=unit, **formats), expected)
    assert_same_bits(fmtsim.mm(codes, values.mT, target=unit, **formats), expected)
    assert_same_bits(fmtsim.mm(codes.int(), values.double().mT, target=unit, **formats), expected)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz}.get(name)
    if dtype is not None:
        assert_same_bits(fmtsim.mm(codes.view(dtype), codes.view(dtype).mT, target=unit), expected)
    if name == "e2m1":
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.float4_e2m1fn_x2)
        assert_same_bits(fmtsim.mm(packed, packed.mT, target=unit), expected)


def test_mixed_operands():
    a, b = normal(4, 32, seed=1).to(torch.float8_e4m3fn), normal(32, 4, seed=2).to(torch.float8_e5m2)
    assert_same_bits(fmtsim.mm(a, b, target=WGMMA), sums(a, b.mT, spec("e4m3", "e5m2")))


# int_mm.


def test_int_mm_wraps():
    a = torch.full((17, 1 << 16), -128, dtype=torch.int8)
    got = fmtsim.int_mm(a[:2], a[:2].mT)
    assert got.dtype == torch.int32
    exact = (128 * 128 << 16) % (1 << 32)
    assert got.tolist() == [[exact] * 2] * 2
    many = a.repeat(1, 2)[:1]
    assert fmtsim.int_mm(many, many.mT).item() == -(1 << 31)
    assert fmtsim.int_mm(many, many.mT, target="int8.satfinite").item() == (1 << 31) - 1


def test_int_mm_agrees_with_torch():
    generator = torch.Generator().manual_seed(1)
    a = torch.randint(-128, 128, (17, 24), generator=generator).to(torch.int8)
    # Without VNNI, oneDNN adds pairs (a + 128) b in saturating int16: |b| <= 64 keeps 2 x 255 x 64 below 2^15.
    b = torch.randint(-64, 65, (24, 8), generator=generator).to(torch.int8)
    for unit in ("int8", "hopper.wgmma"):
        assert torch.equal(fmtsim.int_mm(a, b, target=unit), fmtsim.int_mm(a, b))
    assert torch.equal(fmtsim.int_mm(a, b), torch._int_mm(a, b))


# Gradients: the bits of the products that torch would call.


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_products_on_the_same_machine(notebook, column_major, dtype):
    a, b, g = normal(5, 16, seed=1).to(dtype), normal(16, 6, seed=2).to(dtype), normal(5, 6, seed=3).to(dtype)
    if column_major:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    left, right = a.detach().requires_grad_(), b.detach().requires_grad_()
    options = {"target": "notebook", "allow": "tf32"}
    fmtsim.mm(left, right, **options).backward(g)
    forward, first, second = notebook.calls
    assert_same_bits(left.grad, fmtsim.mm(g, b.mT, **options))
    assert_same_bits(right.grad, fmtsim.mm(a.mT, g, **options))
    assert (forward.m, forward.n, forward.k) == (5, 6, 16)
    # torch multiplies the other way round for operands that are column-major, which a library sees as another shape.
    assert (first.m, first.n, first.k) == ((16, 5, 6) if column_major else (5, 16, 6))
    assert (second.m, second.n, second.k) == ((6, 16, 5) if column_major else (16, 6, 5))
    assert {call.operation for call in notebook.calls} == {"mm"} and not first.bias


def test_gradients_agree_with_torchs_where_sums_are_exact():
    """Small integers: every order gives the same bits, so orientation and shapes are seen alone."""
    generator = torch.Generator().manual_seed(1)
    x, w, bias, g = (
        torch.randint(-3, 4, s, generator=generator).bfloat16() for s in ((2, 3, 8), (4, 8), (4,), (2, 3, 4))
    )
    results = []
    for linear in (torch.nn.functional.linear, lambda *t: fmtsim.linear(*t, target=WGMMA)):
        given = [t.clone().requires_grad_() for t in (x, w, bias)]
        linear(*given).backward(g)
        results.append([t.grad for t in given])
    for mine, theirs in zip(*results, strict=True):
        assert_same_bits(mine, theirs)
    a, b = g, normal(2, 4, 5, seed=1).round().bfloat16()
    results = []
    for bmm in (torch.bmm, lambda *t: fmtsim.bmm(*t, target=WGMMA)):
        given = [t.clone().requires_grad_() for t in (a, b)]
        bmm(*given).sum().backward()
        results.append([t.grad for t in given])
    for mine, theirs in zip(*results, strict=True):
        assert_same_bits(mine, theirs)


def test_gradients_of_wider_outputs_are_rounded_first():
    a, b = (t.requires_grad_() for t in pair())
    g = normal(5, 6, seed=4)
    fmtsim.mm(a, b, target=WGMMA, out_dtype=torch.float32).backward(g)
    rounded = fmtsim.quantize(g, "bf16", out_dtype=torch.bfloat16)
    assert_same_bits(a.grad, fmtsim.mm(rounded, b.detach().mT, target=WGMMA))


def test_gradients_draw_words_of_their_own():
    a, b = (t.requires_grad_() for t in pair())
    fmtsim.mm(a, b, target=STOCHASTIC, generator=3).sum().backward()
    g = torch.ones(5, 6, dtype=torch.bfloat16)
    assert_same_bits(a.grad, fmtsim.mm(g, b.detach().mT, target=STOCHASTIC, generator=RandomKey(3, 1 << 40)))
    assert_same_bits(b.grad, fmtsim.mm(a.detach().mT, g, target=STOCHASTIC, generator=RandomKey(3, 1 << 41)))


def test_only_what_is_asked_for_is_computed(notebook):
    a, b = pair()
    fmtsim.mm(a, b.requires_grad_(), target="notebook").sum().backward()
    assert len(notebook.calls) == 2 and a.grad is None
    with torch.no_grad():
        assert not fmtsim.mm(a, b, target="notebook").requires_grad


def test_second_derivatives_are_refused():
    a, b = (t.requires_grad_() for t in pair())
    y = fmtsim.mm(a, b, target=WGMMA)
    (first,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    with pytest.raises(FmtsimError, match="fmtsim's products cannot be differentiated twice"):
        first.sum().backward()


def test_operands_without_a_gradient_say_so():
    a = torch.ones(4, 32).requires_grad_()
    codes = torch.ones(32, 4)
    with pytest.raises(
        ArgumentError, match="mm has a gradient for float16.*not for torch.float32 x torch.float32 with"
    ):
        fmtsim.mm(a, codes, target=WGMMA, formats="e4m3")
    refused("mma has no gradient, but a requires one; pass a.detach", fmtsim.mma, a, codes.mT, target=WGMMA)
    assert fmtsim.mma(a.detach(), codes.mT, target=WGMMA).shape == (4, 4)


# torch.compile.


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=options.pop("backend", "aot_eager"), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"target": WGMMA},
        {"target": get_unit(WGMMA)},
        {"target": STOCHASTIC, "generator": 3},
        {"target": Datapath(block=4), "plan": GemmPlan(k_tile=8, split=2)},
        {"target": WGMMA, "out_dtype": torch.float8_e4m3fn},
    ],
    ids=lambda options: ",".join(options),
)
def test_compiled_products_have_the_bits_of_eager_ones(options):
    a, b = pair()
    assert_same_bits(compiled(lambda x, y: fmtsim.mm(x, y, **options))(a, b), fmtsim.mm(a, b, **options))


def test_compiled_targets_and_gradients(notebook):
    x, w, bias = normal(2, 5, 16, seed=1).bfloat16(), normal(6, 16, seed=2).bfloat16(), normal(6, seed=3).bfloat16()

    def step(*tensors):
        return fmtsim.linear(*tensors, target="notebook")

    results = []
    for function in (step, compiled(step)):
        given = [t.clone().requires_grad_() for t in (x, w, bias)]
        y = function(*given)
        y.float().square().sum().backward()
        results.append([y.detach(), *(t.grad for t in given)])
    for eager, traced in zip(*results, strict=True):
        assert_same_bits(traced, eager)


@pytest.mark.slow
def test_inductor():
    a, b = pair()
    assert_same_bits(
        compiled(lambda x, y: fmtsim.mm(x, y, target=WGMMA) * 2, backend="inductor")(a, b),
        fmtsim.mm(a, b, target=WGMMA) * 2,
    )


def test_compiled_shapes(notebook):
    """One program serves all shapes of a unit; a target's plan depends on the shape, so each has its own."""
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for options, programs in (({"target": WGMMA}, 1), ({"target": "notebook"}, 3)):
        count.frame_count = 0
        traced = compiled(lambda x, y, options=options: fmtsim.mm(x, y, **options), backend=count, dynamic=True)
        for m, k in ((3, 16), (5, 32), (7, 48)):
            a, b = pair(m, 6, k)
            assert_same_bits(traced(a, b), fmtsim.mm(a, b, **options))
        assert count.frame_count == programs


# What a target is asked.


def test_calls_say_what_a_library_sees(notebook):
    a, b = pair(8, 6, 40)
    fmtsim.mm(a.mT.contiguous().mT, b, target="h200", strict=True)
    call = notebook.calls[-1]
    assert (call.operation, call.m, call.n, call.k, call.a, call.b) == ("mm", 8, 6, 40, "bf16", "bf16")
    assert (call.out, call.accumulate, call.scaling, call.bias) == (torch.bfloat16, "fp32", "none", False)
    assert (call.a_layout, call.b_layout, call.batch, notebook.strict) == ("column", "column", 1, True)
    fmtsim.mm(a, b.mT.contiguous().mT, target="h200", out_dtype=torch.float32)
    call = notebook.calls[-1]
    assert (call.a_layout, call.b_layout, call.out) == ("row", "row", torch.float32)
    fmtsim.linear(a.reshape(2, 4, 40), b.mT.contiguous(), torch.ones(6).bfloat16(), target="h200")
    call = notebook.calls[-1]
    assert (call.operation, call.m, call.bias, call.a_layout, call.b_layout) == ("linear", 8, True, "row", "row")
    fmtsim.bmm(a.expand(3, 8, 40), b.expand(3, 40, 6), target="h200")
    assert (notebook.calls[-1].operation, notebook.calls[-1].batch) == ("bmm", 3)
    fmtsim.mm(a.half(), b.half(), target="h200", allow="fp16_accumulation")
    assert notebook.calls[-1].accumulate == "fp16"
    fmtsim.mm(a.float(), b.float(), target="h200")
    assert (notebook.calls[-1].a, notebook.calls[-1].b) == ("fp32", "fp32")
    fmtsim.mm(a.float(), b.float(), target="h200", allow="tf32")
    assert (notebook.calls[-1].a, notebook.calls[-1].out) == ("tf32", torch.float32)
    fmtsim.mm(a.double(), b.double(), target="h200")
    assert (notebook.calls[-1].a, notebook.calls[-1].accumulate) == ("fp64", "fp64")
    x = torch.ones(24, 8, dtype=torch.int8)
    fmtsim.int_mm(x, x.mT, target="h200")
    call = notebook.calls[-1]
    assert (call.operation, call.a, call.accumulate, call.out) == ("int_mm", "int8", "int32", torch.int32)


def test_a_plan_takes_the_place_of_the_targets(notebook):
    a, b = pair(k=64)
    plan = GemmPlan(k_tile=16, split=2)
    assert_same_bits(fmtsim.mm(a, b, target="h200", plan=plan), fmtsim.mm(a, b, target=WGMMA, plan=plan))


def test_a_name_that_stands_for_another_format_is_looked_up_again(scratch):
    """What was checked of a call is remembered for tensors alike, but not what a name stands for."""
    codes, one = torch.full((1, 1), 60, dtype=torch.uint8), torch.full((1, 1), 56, dtype=torch.uint8)
    for name in ("e4m3", "e5m2"):
        fmtsim.register_format(replace(get_format(name), name="mine", aliases=()), overwrite=True)
        y = fmtsim.mm(codes, one, target="exact", formats=("mine", get_format("e4m3")))
        assert y.item() == fmtsim.decode(codes, name).item()
