"""mm, bmm, linear, int_mm and mma: bits, layouts, formats, gradients, compilation and every refusal."""

import numpy
import pytest
import torch

import fmtsim
from fmtsim import (
    ArgumentError,
    Datapath,
    DtypeError,
    FmtsimError,
    FormatError,
    GemmPlan,
    RandomKey,
    get_format,
    get_unit,
)
from fmtsim.gemm.serialization import GemmSpec
from tests.gemm.machines import install
from tests.gemm.products import bits, finished, normal, same, sums, tensor, wide

WGMMA = "hopper.wgmma"
STOCHASTIC = Datapath(accumulator="bf16", rounding="stochastic")
# torch.compile instantiates an autograd function, and torch warns of that and of its scripting itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning"),
]


@pytest.fixture
def notebook(monkeypatch):
    return install(monkeypatch)


def spec(a, b=None, unit=WGMMA, plan=None, accumulate=None):
    a, b = get_format(a), get_format(b or a)
    path = unit if isinstance(unit, Datapath) else get_unit(unit).mode(a, b, accumulate)
    return GemmSpec(datapath=path, plan=plan or GemmPlan(), a=a, b=b)


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
    got = fmtsim.mm(a, b, unit=WGMMA, out_dtype=out)
    expected = finished(sums(a, b.mT, spec(name)), out or dtype)
    same(got, expected)


def test_layouts_change_no_bit():
    a, b = pair(8, 6, 40)
    expected = fmtsim.mm(a, b, unit=WGMMA)
    big = torch.zeros(16, 80, dtype=a.dtype)
    big[::2, ::2] = a
    for left in (a, a.mT.contiguous().mT, big[::2, ::2]):
        for right in (b, b.mT.contiguous().mT, b.flip(0).flip(0)):
            same(fmtsim.mm(left, right, unit=WGMMA), expected)
    row = a[:1].expand(8, 40)  # a stride of 0
    same(fmtsim.mm(row, b, unit=WGMMA), expected[:1].expand(8, 6))


def test_batches_have_the_bits_of_mm():
    a, b = normal(3, 5, 40, seed=1).bfloat16(), normal(3, 40, 6, seed=2).bfloat16()
    for left, right in ((a, b), (a.mT.contiguous().mT, b.expand(3, 40, 6)), (a[:1].expand(3, 5, 40), b)):
        together = fmtsim.bmm(left, right, unit=WGMMA, out_dtype=torch.float32)
        for i in range(3):
            same(together[i], fmtsim.mm(left[i], right[i], unit=WGMMA, out_dtype=torch.float32))
    drawn = fmtsim.bmm(a, b, datapath=STOCHASTIC, generator=7)
    for i in range(3):
        same(drawn[i], fmtsim.mm(a[i], b[i], datapath=STOCHASTIC, generator=RandomKey(7, i)))


@pytest.mark.parametrize("shape", [(40,), (5, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40), (2, 0, 40)])
def test_linear_takes_any_leading_dimensions(shape):
    x, w, bias = normal(*shape, seed=1).bfloat16(), normal(6, 40, seed=2).bfloat16(), normal(6, seed=3).bfloat16()
    for added in (None, bias):
        y = fmtsim.linear(x, w, added, unit=WGMMA)
        assert y.shape == (*shape[:-1], 6) and y.dtype == torch.bfloat16
        if x.numel():
            same(y.reshape(-1, 6), product(x.reshape(-1, 40), w.mT, torch.bfloat16, "bf16", bias=added))


def test_empty_products():
    a, b = torch.ones(3, 0, dtype=torch.bfloat16), torch.ones(0, 4, dtype=torch.bfloat16)
    same(fmtsim.mm(a, b, unit=WGMMA), torch.zeros(3, 4, dtype=torch.bfloat16))
    assert fmtsim.mm(a[:0], b, unit=WGMMA).shape == (0, 4)
    assert fmtsim.mm(a, b[:, :0], unit=WGMMA).shape == (3, 0)
    assert fmtsim.bmm(a.expand(0, 3, 0), b.expand(0, 0, 4), unit=WGMMA).shape == (0, 3, 4)
    same(fmtsim.linear(a, b.mT, torch.ones(4).bfloat16(), unit=WGMMA), torch.ones(3, 4, dtype=torch.bfloat16))
    assert fmtsim.linear(a.reshape(3, 1, 0), b.mT, unit=WGMMA).shape == (3, 1, 4)


def test_tf32_rounds_to_nearest_even():
    a, b = pair(dtype=torch.float32)
    a[0, 0], a[1, 0] = 1 + 2.0**-11, 1 + 3 * 2.0**-11  # ties
    rounded = [fmtsim.quantize(x, "tf32", overflow="ieee") for x in (a, b)]
    got = fmtsim.mm(a, b, unit=WGMMA, allow_tf32=True)
    same(got, product(*rounded, torch.float32, "tf32"))
    same(got, fmtsim.mm(*rounded, unit=WGMMA, a_format="tf32", b_format="tf32"))


def test_plans_and_accumulators():
    a, b = pair(k=96, dtype=torch.float16)
    plan = GemmPlan(k_tile=32, split=2)
    same(fmtsim.mm(a, b, unit=WGMMA, plan=plan), product(a, b, torch.float16, "fp16", plan=plan))
    half = fmtsim.mm(a, b, unit=WGMMA, allow_fp16_accumulation=True)
    same(half, product(a, b, torch.float16, "fp16", accumulate="fp16"))
    same(half, fmtsim.mm(a, b, unit=WGMMA, accumulate="fp16"))
    assert not torch.equal(half, fmtsim.mm(a, b, unit=WGMMA))
    brain = a.bfloat16(), b.bfloat16()  # torch's switch does not concern bfloat16
    same(fmtsim.mm(*brain, unit=WGMMA, allow_fp16_accumulation=True), fmtsim.mm(*brain, unit=WGMMA))


def test_float64():
    a, b = wide(4, 9, seed=1).double() * (1 + 2.0**-45), wide(9, 3, seed=2).double() * (1 - 2.0**-44)
    expected = finished(sums(a, b.mT, spec("fp64", unit="fp64_fma"), torch.float64), torch.float64)
    same(fmtsim.mm(a, b, unit="fp64_fma"), expected)
    same(fmtsim.mm(a, b, unit="hopper.mma"), expected)


def test_own_datapath_and_random_words():
    a, b = pair()
    same(fmtsim.mm(a, b, datapath=Datapath(block=4, fraction_bits=10)),
         product(a, b, torch.bfloat16, "bf16", unit=Datapath(block=4, fraction_bits=10)))  # fmt: skip
    expected = finished(sums(a, b.mT, spec("bf16", unit=STOCHASTIC), random=RandomKey(11)), torch.bfloat16)
    same(fmtsim.mm(a, b, datapath=STOCHASTIC, generator=11), expected)
    generator = torch.Generator().manual_seed(5)
    drawn = fmtsim.mm(a, b, datapath=STOCHASTIC, generator=generator)
    assert not torch.equal(drawn, fmtsim.mm(a, b, datapath=STOCHASTIC, generator=generator))
    same(drawn, fmtsim.mm(a, b, datapath=STOCHASTIC, generator=torch.Generator().manual_seed(5)))
    torch.manual_seed(9)
    default = fmtsim.mm(a, b, datapath=STOCHASTIC)
    torch.manual_seed(9)
    same(default, fmtsim.mm(a, b, datapath=STOCHASTIC))


# Formats.


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e2m3", "e3m2", "e2m1"])
def test_values_codes_and_torchs_own_dtypes_are_the_same_operand(name):
    fmt = get_format(name)
    unit = "cdna3.mfma" if name == "e4m3fnuz" else "blackwell.tcgen05"
    codes = torch.randint(0, 1 << fmt.bits, (6, 32), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    values = fmtsim.decode(codes, name)
    expected = sums(values, values, spec(name, unit=unit))
    formats = {"a_format": name, "b_format": name}
    same(fmtsim.mm(codes, codes.mT, unit=unit, **formats), expected)
    same(fmtsim.mm(values, values.mT, unit=unit, **formats), expected)
    same(fmtsim.mm(codes, values.mT, unit=unit, **formats), expected)
    same(fmtsim.mm(codes.int(), values.double().mT, unit=unit, **formats), expected)
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e4m3fnuz": torch.float8_e4m3fnuz}.get(name)
    if dtype is not None:
        same(fmtsim.mm(codes.view(dtype), codes.view(dtype).mT, unit=unit), expected)
    if name == "e2m1":
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.float4_e2m1fn_x2)
        same(fmtsim.mm(packed, packed.mT, unit=unit), expected)


def test_mixed_operands():
    a, b = normal(4, 32, seed=1).to(torch.float8_e4m3fn), normal(32, 4, seed=2).to(torch.float8_e5m2)
    same(fmtsim.mm(a, b, unit=WGMMA), sums(a, b.mT, spec("e4m3", "e5m2")))


# int_mm.


def test_int_mm_wraps():
    a = torch.full((17, 1 << 16), -128, dtype=torch.int8)
    got = fmtsim.int_mm(a[:2], a[:2].mT)
    assert got.dtype == torch.int32
    exact = (128 * 128 << 16) % (1 << 32)
    assert got.tolist() == [[exact] * 2] * 2
    many = a.repeat(1, 2)[:1]
    assert fmtsim.int_mm(many, many.mT).item() == -(1 << 31)
    assert fmtsim.int_mm(many, many.mT, unit="int8.satfinite").item() == (1 << 31) - 1


def test_int_mm_agrees_with_torch():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-128, 128, s, generator=generator).to(torch.int8) for s in ((17, 24), (24, 8)))
    for unit in (None, "int8", "hopper.wgmma"):
        assert torch.equal(fmtsim.int_mm(a, b, unit=unit), torch._int_mm(a, b))


# mma.


def test_mma_is_one_instruction():
    a, b = wide(4, 32, seed=1).to(torch.float8_e4m3fn), wide(8, 32, seed=2).to(torch.float8_e5m2)
    c = wide(4, 8, seed=3)
    same(fmtsim.mma(a, b, unit=WGMMA), sums(a, b, spec("e4m3", "e5m2")))
    cut = fmtsim.quantize(
        c, fmtsim.FloatFormat(name="e8m13", exponent_bits=8, mantissa_bits=13), rounding="toward_zero"
    )
    same(fmtsim.mma(a, b, c, unit=WGMMA), sums(a, b, spec("e4m3", "e5m2"), c=cut))
    same(fmtsim.mma(a, b, c, unit="hopper.mma"), sums(a, b, spec("e4m3", "e5m2", unit="hopper.mma"), c=c))
    half = c.half()
    definition = spec("e4m3", "e5m2", unit="hopper.mma", accumulate="fp16")
    got = fmtsim.mma(a, b, half, unit="hopper.mma")
    same(got, finished(sums(a, b, definition, c=half.float()), torch.float16))
    same(fmtsim.mma(a, b, unit="hopper.mma", accumulate="fp16"), finished(sums(a, b, definition), torch.float16))


def test_mma_batches():
    a, b = normal(2, 3, 4, 16, seed=1).bfloat16(), normal(2, 3, 5, 16, seed=2).bfloat16()
    c = normal(2, 3, 4, 5, seed=3)
    options = {"unit": "blackwell.tcgen05"}
    expected = torch.stack([
        torch.stack([fmtsim.mma(a[i, j], b[i, j], c[i, j], **options) for j in range(3)]) for i in range(2)
    ])  # fmt: skip
    same(fmtsim.mma(a, b, c, **options), expected)
    shared = torch.stack([fmtsim.mma(a[i], b[1, 1], c[0, 0], **options) for i in range(2)])
    same(fmtsim.mma(a, b[1, 1], c[0, 0], **options), shared)
    same(shared[1, 2], fmtsim.mma(a[1, 2], b[1, 1], c[0, 0], **options))
    same(fmtsim.mma(a[1, 2], b, c[0, 0], **options)[0, 1], fmtsim.mma(a[1, 2], b[0, 1], c[0, 0], **options))
    assert fmtsim.mma(a[:0], b[:0], **options).shape == (0, 3, 4, 5)
    drawn = fmtsim.mma(a[0], b[0, 0], unit=STOCHASTIC, generator=3)
    for i in range(3):
        same(drawn[i], fmtsim.mma(a[0, i], b[0, 0], unit=STOCHASTIC, generator=RandomKey(3, i)))


def test_mma_ignores_the_low_bits_of_tf32():
    a, b = wide(4, 8, seed=1), wide(4, 8, seed=2)
    cut = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    expected = sums(*cut, spec("tf32"))
    same(fmtsim.mma(a, b, unit=WGMMA), expected)
    same(fmtsim.mma(a, b, unit=WGMMA, a_format="tf32", b_format="tf32"), expected)
    same(fmtsim.mma(a, b, unit="fp32_fma"), sums(a, b, spec("fp32", unit="fp32_fma")))


@pytest.mark.parametrize(
    ("unit", "scale", "group"), [("mxf8f6f4", "e8m0", 32), ("nvf4", "ue4m3", 16), ("nvf4", "e8m0", 16)]
)
def test_mma_scales(unit, scale, group):
    unit = f"blackwell.tcgen05.{unit}"
    generator = torch.Generator().manual_seed(1)
    codes = [torch.randint(0, 16, (n, 64), generator=generator).to(torch.uint8) for n in (3, 5)]
    span = (110, 140) if scale == "e8m0" else (0, 127)
    marks = [torch.randint(*span, (n, 64 // group), generator=generator).to(torch.uint8) for n in (3, 5)]
    values, scales = [fmtsim.decode(x, "e2m1") for x in codes], [fmtsim.decode(x, scale) for x in marks]
    path = get_unit(unit).mode("e2m1", "e2m1", scale=scale)
    fmt = get_format("e2m1")
    definition = GemmSpec(datapath=path, plan=GemmPlan(), a=fmt, b=fmt)
    expected = sums(*values, definition, scale_a=scales[0], scale_b=scales[1])
    formats = {"a_format": "e2m1", "b_format": "e2m1", "unit": unit}
    dtype = torch.float8_e8m0fnu if scale == "e8m0" else torch.float8_e4m3fn
    typed = [x.view(dtype) for x in marks]
    same(fmtsim.mma(*codes, scale_a=typed[0], scale_b=typed[1], **formats), expected)
    one = torch.full_like(marks[1], 127 if scale == "e8m0" else 0x38).view(dtype)
    plain = fmtsim.mma(*codes, scale_a=typed[0], **formats)
    same(plain, fmtsim.mma(*codes, scale_a=typed[0], scale_b=one, **formats))
    if (unit, scale) != ("blackwell.tcgen05.nvf4", "e8m0"):
        same(fmtsim.mma(*codes, scale_a=scales[0], scale_b=marks[1], **formats), expected)
    if scale == "ue4m3":
        signed = (marks[0] | 128).view(dtype)  # the unit ignores the sign
        same(fmtsim.mma(*codes, scale_a=signed, scale_b=typed[1], **formats), expected)
    broken = marks[0].clone()
    broken[1, 0] = 255 if scale == "e8m0" else 127
    got = fmtsim.mma(*codes, scale_a=broken.view(dtype), scale_b=typed[1], **formats)
    assert bits(got)[1].tolist() == [0x7FFFFFFF] * 5 and not got[0].isnan().any()


# Gradients: the bits of the products that torch would call.


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_products_on_the_same_machine(notebook, column_major, dtype):
    a, b, g = normal(5, 16, seed=1).to(dtype), normal(16, 6, seed=2).to(dtype), normal(5, 6, seed=3).to(dtype)
    if column_major:
        a, b = a.mT.contiguous().mT, b.mT.contiguous().mT
    left, right = a.detach().requires_grad_(), b.detach().requires_grad_()
    options = {"target": "notebook", "allow_tf32": True}
    fmtsim.mm(left, right, **options).backward(g)
    forward, first, second = notebook.calls
    same(left.grad, fmtsim.mm(g, b.mT, **options))
    same(right.grad, fmtsim.mm(a.mT, g, **options))
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
    for linear in (torch.nn.functional.linear, lambda *t: fmtsim.linear(*t, unit=WGMMA)):
        given = [t.clone().requires_grad_() for t in (x, w, bias)]
        linear(*given).backward(g)
        results.append([t.grad for t in given])
    for mine, theirs in zip(*results, strict=True):
        same(mine, theirs)
    a, b = g, normal(2, 4, 5, seed=1).round().bfloat16()
    results = []
    for bmm in (torch.bmm, lambda *t: fmtsim.bmm(*t, unit=WGMMA)):
        given = [t.clone().requires_grad_() for t in (a, b)]
        bmm(*given).sum().backward()
        results.append([t.grad for t in given])
    for mine, theirs in zip(*results, strict=True):
        same(mine, theirs)


def test_gradients_of_wider_outputs_are_rounded_first():
    a, b = (t.requires_grad_() for t in pair())
    g = normal(5, 6, seed=4)
    fmtsim.mm(a, b, unit=WGMMA, out_dtype=torch.float32).backward(g)
    rounded = fmtsim.quantize(g, "bf16", out_dtype=torch.bfloat16)
    same(a.grad, fmtsim.mm(rounded, b.detach().mT, unit=WGMMA))


def test_gradients_draw_words_of_their_own():
    a, b = (t.requires_grad_() for t in pair())
    fmtsim.mm(a, b, datapath=STOCHASTIC, generator=3).sum().backward()
    g = torch.ones(5, 6, dtype=torch.bfloat16)
    same(a.grad, fmtsim.mm(g, b.detach().mT, datapath=STOCHASTIC, generator=RandomKey(3, 1 << 40)))
    same(b.grad, fmtsim.mm(a.detach().mT, g, datapath=STOCHASTIC, generator=RandomKey(3, 1 << 41)))


def test_only_what_is_asked_for_is_computed(notebook):
    a, b = pair()
    fmtsim.mm(a, b.requires_grad_(), target="notebook").sum().backward()
    assert len(notebook.calls) == 2 and a.grad is None
    with torch.no_grad():
        assert not fmtsim.mm(a, b, target="notebook").requires_grad


def test_second_derivatives_are_refused():
    a, b = (t.requires_grad_() for t in pair())
    y = fmtsim.mm(a, b, unit=WGMMA)
    (first,) = torch.autograd.grad(y.sum(), a, create_graph=True)
    with pytest.raises(FmtsimError, match="fmtsim's products cannot be differentiated twice"):
        first.sum().backward()


def test_operands_without_a_gradient_say_so():
    a = torch.ones(4, 32).requires_grad_()
    codes = torch.ones(32, 4)
    with pytest.raises(
        ArgumentError, match="mm has a gradient for float16.*not for torch.float32 x torch.float32 with"
    ):
        fmtsim.mm(a, codes, unit=WGMMA, a_format="e4m3", b_format="e4m3")
    with pytest.raises(ArgumentError, match="mma has no gradient, but a requires one; pass a.detach"):
        fmtsim.mma(a, codes.mT, unit=WGMMA)
    assert fmtsim.mma(a.detach(), codes.mT, unit=WGMMA).shape == (4, 4)


# torch.compile.


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=options.pop("backend", "aot_eager"), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"unit": WGMMA},
        {"unit": get_unit(WGMMA)},
        {"datapath": STOCHASTIC, "generator": 3},
        {"datapath": Datapath(block=4), "plan": GemmPlan(k_tile=8, split=2)},
        {"unit": WGMMA, "out_dtype": torch.float8_e4m3fn},
    ],
    ids=lambda options: ",".join(options),
)
def test_compiled_products_have_the_bits_of_eager_ones(options):
    a, b = pair()
    same(compiled(lambda x, y: fmtsim.mm(x, y, **options))(a, b), fmtsim.mm(a, b, **options))


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
        same(traced, eager)


@pytest.mark.slow
def test_inductor():
    a, b = pair()
    same(
        compiled(lambda x, y: fmtsim.mm(x, y, unit=WGMMA) * 2, backend="inductor")(a, b),
        fmtsim.mm(a, b, unit=WGMMA) * 2,
    )


def test_compiled_shapes(notebook):
    """One program serves all shapes of a unit; a target's plan depends on the shape, so each has its own."""
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for options, programs in (({"unit": WGMMA}, 1), ({"target": "notebook"}, 3)):
        count.frame_count = 0
        traced = compiled(lambda x, y, options=options: fmtsim.mm(x, y, **options), backend=count, dynamic=True)
        for m, k in ((3, 16), (5, 32), (7, 48)):
            a, b = pair(m, 6, k)
            same(traced(a, b), fmtsim.mm(a, b, **options))
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
    fmtsim.mm(a.half(), b.half(), target="h200", allow_fp16_accumulation=True)
    assert notebook.calls[-1].accumulate == "fp16"
    fmtsim.mm(a.float(), b.float(), target="h200")
    assert (notebook.calls[-1].a, notebook.calls[-1].b) == ("fp32", "fp32")
    fmtsim.mm(a.float(), b.float(), target="h200", allow_tf32=True)
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
    same(fmtsim.mm(a, b, target="h200", plan=plan), fmtsim.mm(a, b, unit=WGMMA, plan=plan))


# Refusals.

A, B = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
FP8 = torch.ones(4, 8).to(torch.float8_e4m3fn)
INT = torch.ones(4, 8, dtype=torch.int8)
REFUSED = {
    "no machine": (lambda: fmtsim.mm(A, B), ArgumentError,
        r"mm needs a machine; pass one of target= .*'h200'.*datapath="),
    "two machines": (lambda: fmtsim.mm(A, B, unit=WGMMA, datapath=Datapath()), ArgumentError,
                     "mm got unit= and datapath=; pass one of"),
    "no tensor": (lambda: fmtsim.mm([[1.0]], B, unit=WGMMA), DtypeError,
        r"a is list, not a tensor; pass torch.tensor\(a\)"),
    "array": (lambda: fmtsim.mm(A, numpy.ones((8, 4)), unit=WGMMA), DtypeError, "b is ndarray, not a tensor"),
    "sparse": (lambda: fmtsim.mm(A.float().to_sparse(), B, unit=WGMMA), ArgumentError,
               "a has layout torch.sparse_coo; pass a dense tensor"),
    "vector": (lambda: fmtsim.mm(A[0], B, unit=WGMMA), ArgumentError,
        r"a has shape \(8,\); pass a tensor of 2 dimensions"),
    "stack": (lambda: fmtsim.mm(A[None], B, unit=WGMMA), ArgumentError, r"a has shape \(1, 4, 8\); pass a tensor of 2"),
    "matrices": (lambda: fmtsim.bmm(A, B, unit=WGMMA), ArgumentError, r"a has shape \(4, 8\); pass a tensor of 3"),
    "scalar": (lambda: fmtsim.linear(A[0, 0], A, unit=WGMMA), ArgumentError, "pass a tensor of 1 dimensions or more"),
    "K": (lambda: fmtsim.mm(A, A, unit=WGMMA), ArgumentError, r"mm: a of shape \(4, 8\) and b .* but K is 8 and 4"),
    "batch": (lambda: fmtsim.bmm(A.expand(2, 4, 8), B.expand(3, 8, 4), unit=WGMMA), ArgumentError,
        "differ in their batch"),
    "linear K": (lambda: fmtsim.linear(A, B, unit=WGMMA), ArgumentError,
        r"x of shape \(4, 8\) does not fit w of shape"),
    "devices": (lambda: fmtsim.mm(A, B.to("meta"), unit=WGMMA), ArgumentError,
        "a is on cpu, b on meta; move them to one"),
    "integers": (lambda: fmtsim.mm(A.int(), B.int(), unit=WGMMA), DtypeError,
        "a has dtype torch.int32; pass one of float16"),
    "complex": (lambda: fmtsim.mm(A.to(torch.complex64), B, unit=WGMMA), DtypeError, "a has dtype torch.complex64"),
    "unit": (lambda: fmtsim.mm(A, B, unit="hoper.wgmma"), ArgumentError, "unknown unit 'hoper.wgmma'; did you mean"),
    "pair": (lambda: fmtsim.mm(A, B.half(), unit=WGMMA), ArgumentError, "unit hopper.wgmma does not take bf16 x fp16"),
    "fp32": (lambda: fmtsim.mm(A.float(), B.float(), unit=WGMMA), ArgumentError,
             "unit hopper.wgmma multiplies TF32, not float32; pass allow_tf32=True"),
    "integers on floats": (lambda: fmtsim.mm(INT, INT.mT, datapath=Datapath()), FormatError,
        "Datapath does not multiply"),
    "datapath": (lambda: fmtsim.mm(A, B, datapath=WGMMA), ArgumentError,
        "datapath='hopper.wgmma' is not an arithmetic"),
    "plan": (lambda: fmtsim.mm(A, B, unit=WGMMA, plan="chain"), ArgumentError, "plan='chain' is not an order of sums"),
    "accumulate": (lambda: fmtsim.mm(A, B, unit=WGMMA, accumulate="bf16"), ArgumentError,
                   "accumulate='bf16' is not possible; choose one of fp32, fp16, fp64, int32"),
    "own accumulate": (lambda: fmtsim.mm(A, B, datapath=Datapath(), accumulate="fp16"), ArgumentError,
                       "accumulate='fp16' is not what the datapath sums in; leave it out"),
    "contradiction": (lambda: fmtsim.mm(A, B, unit=WGMMA, accumulate="fp32", allow_fp16_accumulation=True),
        ArgumentError,
                      "accumulate='fp32' contradicts allow_fp16_accumulation=True"),
    "wide half": (lambda: fmtsim.mm(A.half(), B.half(), unit=WGMMA, out_dtype=torch.float32,
                                    allow_fp16_accumulation=True),
                  ArgumentError,
                  "allow_fp16_accumulation with out_dtype=torch.float32 is not a product that cuBLAS has"),
    "out": (lambda: fmtsim.mm(A, B, unit=WGMMA, out_dtype=torch.int8), DtypeError,
        "out_dtype=torch.int8 is not the dtype"),
    "out text": (lambda: fmtsim.mm(A, B, unit=WGMMA, out_dtype="float32"), DtypeError,
        "out_dtype='float32' is not a dtype"),
    "integer sums": (lambda: fmtsim.mm(INT, INT.mT, unit="int8", out_dtype=torch.float32), DtypeError,
                     "out_dtype=torch.float32 is not what integers sum to; choose torch.int32"),
    "float sums": (lambda: fmtsim.mm(A, B, unit=WGMMA, out_dtype=torch.int32), DtypeError,
                   "out_dtype=torch.int32 is not the dtype of a product"),
    "generator": (lambda: fmtsim.mm(A, B, unit=WGMMA, generator=1), ArgumentError,
        "generator= is for units that round"),
    "seed": (lambda: fmtsim.mm(A, B, datapath=STOCHASTIC, generator="x"), ArgumentError, "generator='x' is not a seed"),
    "keyword": (lambda: fmtsim.linear(A, A, unit=WGMMA, target_="x"), ArgumentError,
        "linear has no argument 'target_'; it"),
    "bias shape": (lambda: fmtsim.linear(A, A, A[0], unit=WGMMA), ArgumentError,
        r"bias of shape \(8,\) does not fit w .*\[4\]"),
    "bias dtype": (lambda: fmtsim.linear(A, A, INT[:, 0], unit=WGMMA), DtypeError,
        "bias has dtype torch.int8; pass float16"),
    "format": (lambda: fmtsim.mm(A, B, unit=WGMMA, a_format="e9m9x"), FormatError, "e9m9x"),
    "block format": (lambda: fmtsim.mm(A, B, unit="exact", a_format="mxfp4"), FormatError,
                     "a_format='mxfp4' is not a plain number format"),
    "other format": (lambda: fmtsim.mm(FP8, FP8.mT, unit=WGMMA, a_format="e5m2"), DtypeError,
                     "a has dtype torch.float8_e4m3fn, which is not e5m2; leave a_format out"),
    "signed codes": (lambda: fmtsim.mm(INT, INT.mT, unit=WGMMA, a_format="e4m3"), DtypeError,
                     r"pass codes of e4m3 as a.view\(torch.uint8\)"),
    "float integers": (lambda: fmtsim.mm(A, B, unit="int8", a_format="int8", b_format="int8"), DtypeError,
                       "a has dtype torch.bfloat16; pass int8 as a torch.int8 tensor"),
    "off the format": (lambda: fmtsim.mm(A * 0.3, B, unit=WGMMA, a_format="e4m3", b_format="e4m3"), ArgumentError,
                       "a holds 0.300781, which is not a value of e4m3; round it first"),
    "promotions": (lambda: fmtsim.mm(A, B, datapath=Datapath(promote_every=16), plan=GemmPlan(promote_every=32)),
                   ArgumentError, "the unit promotes every 16 products, the plan every 32"),
    "scaled promotion": (lambda: fmtsim.mm(A, B, unit=WGMMA, plan=GemmPlan(promote_every=128, scaled_promotion=True)),
                         ArgumentError, "a plan with scaled_promotion=True does not fit scaling 'none'"),
    "integer plan": (lambda: fmtsim.mm(INT, INT.mT, unit="int8", plan=GemmPlan(partial="bf16")), ArgumentError,
                     "integer sums have neither scaled_promotion nor partial"),
    "scale blocks": (lambda: fmtsim.mm(torch.ones(4, 64), torch.ones(64, 4), unit="blackwell.tcgen05.nvf4",
        a_format="e2m1",
                                       b_format="e2m1", plan=GemmPlan(k_tile=24)), ArgumentError,
                     "k_tile=24 cuts the unit's scale blocks of 16 products; choose a multiple"),
    "residue": (lambda: fmtsim.mm(torch.ones(4, 40), torch.ones(40, 4), unit="blackwell.tcgen05.nvf4",
        a_format="e2m1",
                                  b_format="e2m1", plan=GemmPlan(k_tile=32, residue_first=True)), ArgumentError,
                "residue_first with K=40 cuts the unit's scale blocks of 16; pad K"),
    "int_mm dtype": (lambda: fmtsim.int_mm(A, B), DtypeError, "int_mm: a has dtype torch.bfloat16; pass torch.int8"),
    "int_mm K": (lambda: fmtsim.int_mm(INT, INT), ArgumentError, "int_mm: a of shape .* but K is 8 and 4"),
    "int_mm shape": (lambda: fmtsim.int_mm(INT, INT.mT, target="h200"), ArgumentError,
                     "torch._int_mm on CUDA takes M above 16 .* not M=4, K=8, N=4; pad the operands"),
    "mma K": (lambda: fmtsim.mma(A, B, unit=WGMMA), ArgumentError, r"mma: a of shape \(4, 8\) and b .* differ in K"),
    "mma c": (lambda: fmtsim.mma(A, A, torch.ones(4, 5), unit=WGMMA), ArgumentError,
        r"c has shape \(4, 5\); pass \[..., 4, 4\]"),
    "mma c dtype": (lambda: fmtsim.mma(A, A, A[:, :4], unit=WGMMA), DtypeError,
        "c has dtype torch.bfloat16; pass one of float32"),
    "mma c half": (lambda: fmtsim.mma(A, A, torch.ones(4, 4).half(), unit=WGMMA), ArgumentError,
        "does not take bf16 x bf16 -> fp16"),
    "mma c and accumulate": (lambda: fmtsim.mma(A, A, torch.ones(4, 4).half(), unit=WGMMA, accumulate="fp32"),
        DtypeError,
                             "c has dtype torch.float16, but accumulate='fp32'; leave one of them out"),
    "mma c of a datapath": (lambda: fmtsim.mma(A, A, torch.ones(4, 4).half(), unit=Datapath()), DtypeError,
                            "c has dtype torch.float16, but the unit sums in torch.float32"),
    "mma c off the accumulator": (
        lambda: fmtsim.mma(A, A, torch.full((4, 4), 1.001), unit=Datapath(accumulator="bf16")), ArgumentError,
        "c holds numbers that the accumulator bf16 lacks; round it first"),
    "mma batch": (lambda: fmtsim.mma(A.expand(2, 4, 8), A.expand(3, 4, 8), unit=WGMMA), ArgumentError,
                  r"mma: leading dimensions \(2,\), \(3,\) do not broadcast"),
    "mma scales": (lambda: fmtsim.mma(A, A, unit=WGMMA, scale_a=torch.ones(4, 1)), ArgumentError,
                   "the unit has no scales of its own; leave scale_a and scale_b out, or call scaled_mm"),
    "mma scale shape": (lambda: fmtsim.mma(FP8, FP8, unit="blackwell.tcgen05.mxf8f6f4", scale_a=torch.ones(4, 2)),
                        ArgumentError,
                        r"scale_a has shape \(4, 2\); pass \[..., 4, 1\], a scale for every 32 products"),
    "mma scale value": (lambda: fmtsim.mma(FP8, FP8, unit="blackwell.tcgen05.mxf8f6f4",
        scale_a=torch.full((4, 1), 3.0)),
                        ArgumentError, "scale_a holds 3, which is not a value of e8m0; round it first"),
    "mma scale dtype": (lambda: fmtsim.mma(FP8, FP8, unit="blackwell.tcgen05.mxf8f6f4", scale_a=INT[:, :1]), DtypeError,
                        "scale_a has dtype torch.int8; pass e8m0 codes as torch.uint8, or floats"),
    "mma scale format": (lambda: fmtsim.mma(FP8, FP8, unit="blackwell.tcgen05.mxf8f6f4", scale_a=FP8[:, :1]),
        ArgumentError,
                         "blackwell.tcgen05.mxf8f6f4 does not take e4m3 x e4m3 with ue4m3 scales"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


LIBRARY = {
    "dtypes": (lambda: fmtsim.mm(A, B.half(), target="x"), DtypeError,
        "a has dtype torch.bfloat16, b torch.float16; torch"),
    "fp8": (lambda: fmtsim.mm(FP8, FP8.mT, target="x"), DtypeError,
        "torch.mm does not take torch.float8_e4m3fn; call fmtsim.scaled_mm"),
    "out": (lambda: fmtsim.mm(A, B, target="x", out_dtype=torch.float16), DtypeError,
            "torch.mm does not turn torch.bfloat16 into torch.float16; choose torch.bfloat16 or torch.float32"),
    "wide out": (lambda: fmtsim.mm(A.float(), B.float(), target="x", out_dtype=torch.float64), DtypeError,
                 "torch.mm does not turn torch.float32 into torch.float64; choose torch.float32, or pass unit="),
    "bias": (lambda: fmtsim.linear(A, A, A[0, :4].float(), target="x"), DtypeError,
        "bias has dtype torch.float32; pass torch.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIBRARY)
def test_what_torch_refuses_a_target_refuses(notebook, case):
    call, error, message = LIBRARY[case]
    with pytest.raises(error, match=message):
        call()


def test_the_comparison_notices_a_planted_error():
    a, b = pair()
    right = fmtsim.mm(a, b, unit=WGMMA, out_dtype=torch.float32)
    for wrong in (fmtsim.mm(a, b, unit="ampere.mma", out_dtype=torch.float32), a.float() @ b.float()):
        with pytest.raises(AssertionError, match="differ"):
            same(wrong, right)
    planted = tensor([[float("nan")]], torch.float32, (1, 1))
    with pytest.raises(AssertionError, match="differ"):
        same(planted, torch.tensor([[torch.nan]]))
