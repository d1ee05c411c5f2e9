# SPDX-License-Identifier: Apache-2.0
"""What a layer asks of a library or unit, its products without one, and the seeds of its random keys."""

import dataclasses
import itertools

import pytest
import torch

from fmtsim import EmulatedGEMM, Gemm, LinearConfig, Quantizer, get_format, linear_config
from fmtsim.casts.quantize import quantize
from fmtsim.formats.scaling import Scaling
from fmtsim.gemm.layers import multiply as multiply_module
from fmtsim.gemm.layers.emulated_gemm import run_layer
from fmtsim.gemm.layers.keys import OUTPUTS, SCALES, SIGNS, UNITS, Layer, random_stream
from fmtsim.gemm.layers.layer import Lane, _Pass
from fmtsim.gemm.layers.multiply import _library_call, finish_sums, multiply
from fmtsim.gemm.layers.quantize_operand import elements_dtype
from fmtsim.gemm.layers.watch import CallObserver
from fmtsim.spec.operand import Operand
from fmtsim.spec.quantizer import Hadamard
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def test_streams_are_splitmix64():
    """Its first outputs for the seed 1234567, as its authors' C code prints them; keys have 63 bits."""
    outputs = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    assert [random_stream(1234567, use) for use in range(5)] == [n >> 1 for n in outputs]
    assert (UNITS, OUTPUTS, SCALES, SIGNS) == (6, 9, 12, 18)  # six operands before them: no two uses share a stream
    generator = torch.Generator()
    assert random_stream(generator, 3) is generator and random_stream(None, 3) is None


# dtype of the operands, of the result, of the output format, of the bias: what torch.mm and torch.nn.functional.linear
# write on a GPU (the operands' dtype, and float32 from torch.mm), and whether they add the bias.
PLAIN = [
    (BF16, BF16, None, None, ("linear", BF16, False)), (BF16, F32, None, None, ("mm", F32, False)),
    (BF16, F16, None, None, ("mm", F32, False)), (F16, F64, None, None, ("mm", F32, False)),
    (F32, BF16, None, None, ("linear", F32, False)), (F64, F64, None, None, ("linear", F64, False)),
    (F64, F32, None, None, ("linear", F64, False)), (F32, F32, None, None, ("linear", F32, False)),
    (BF16, F32, "bf16", None, ("linear", BF16, False)), (BF16, BF16, "fp32", None, ("mm", F32, False)),
    (BF16, BF16, "e2m3", None, ("mm", F32, False)), (BF16, BF16, None, BF16, ("linear", BF16, True)),
    (BF16, F32, None, F32, ("mm", F32, False)), (BF16, BF16, None, F32, ("mm", F32, False)),
    (F32, F32, None, F32, ("linear", F32, True)), (F64, F64, None, F64, ("linear", F64, True)),
    (F64, F32, None, F32, ("mm", F64, False)),
]  # fmt: skip
# Likewise torch._scaled_mm: every dtype but float64, a bias of 16 bits to results of its own dtype or of FP8.
SCALED = [
    (E4M3, BF16, None, None, (BF16, False)), (E4M3, F16, None, None, (F16, False)),
    (E4M3, F32, None, None, (F32, False)), (E4M3, F64, None, None, (F32, False)),
    (E4M3, F32, "e4m3", None, (E4M3, False)), (E4M3, F32, "e5m2", None, (E5M2, False)),
    (E4M3, F32, "fp64", None, (F32, False)), (E4M3, BF16, None, BF16, (BF16, True)),
    (E4M3, F16, None, F16, (F16, True)), (E4M3, F32, None, F32, (F32, False)), (E4M3, F32, None, BF16, (F32, False)),
    (E4M3, F16, None, BF16, (F32, False)), (E4M3, F32, "e4m3", BF16, (E4M3, True)),
    (E4M3, F32, "e4m3", F32, (F32, False)),
]  # fmt: skip


def asked(operation, own, dtype, out, bias, **machine):
    rounded = Quantizer() if out is None else Quantizer(format=get_format(out))
    return _library_call(
        operation, own, None if bias is None else torch.ones(2, dtype=bias), Gemm(out=rounded, **machine), dtype
    )


@pytest.mark.parametrize(("own", "dtype", "out", "bias", "expected"), PLAIN)
def test_plain_products_of_a_library(own, dtype, out, bias, expected):
    assert asked("linear", own, dtype, out, bias, target="h200") == expected
    assert asked("mm", own, dtype, out, bias, target="h200") == ("mm", *expected[1:])


@pytest.mark.parametrize(("own", "dtype", "out", "bias", "expected"), SCALED)
def test_scaled_products_of_a_library(own, dtype, out, bias, expected):
    assert asked("scaled_mm", own, dtype, out, bias, target="h200") == ("scaled_mm", *expected)


def test_a_unit_writes_every_dtype_and_adds_every_bias():
    for operation in ("mm", "linear", "scaled_mm"):
        for bias in (None, BF16, F32):
            for own, dtype, out, expected in (
                (BF16, F16, None, F16), (BF16, F32, "e4m3", E4M3), (E4M3, BF16, "bf16", BF16), (BF16, F64, None, F64),
                (BF16, BF16, "e2m3", F32), (F64, F32, "e2m3", F64), (BF16, F64, "e2m3", F64),
            ):  # fmt: skip
                found = asked(operation, own, dtype, out, bias, target="exact")
                assert found == (operation, expected, bias is not None)


# Products without a unit: sums that float32 holds whatever their order, so that every other rounding shows.


def small(rows, columns, dtype, seed):
    """Return numbers of 8 significant bits (4 in FP8) near 1 of either sign."""
    generator = torch.Generator().manual_seed(seed)
    bits = 3 if dtype.itemsize == 1 else 7
    x = 1 + torch.randint(0, 1 << bits, (rows, columns), generator=generator) / (1 << bits)
    return (x * (2 * torch.randint(0, 2, (rows, columns), generator=generator) - 1)).to(dtype)


def operand(dtype, rows, scale, seed, rest=None):
    """Return an operand of rows of 12 elements; ``scale``: none, of the tensor, of rows, of two rows, or beside."""
    scales = {"tensor": (1, 1), "rows": (rows, 1), "pairs": (rows // 2, 1)}
    block = {"pairs": (2, 12), "rows": (1, 12)}.get(scale, (rows, 12))
    given = torch.arange(1, 1 + rows).float()[: scales.get(scale, (1, 1))[0], None] / 7 if scale in scales else None
    beside = torch.tensor(1 / 11) if scale == "beside" else None
    return Operand(small(rows, 12, dtype, seed), Quantizer(), given, beside, block, None, rest)


def rounded(x):
    """Round float64 numbers to float32, as one operation does."""
    return x.float().double()


@pytest.mark.parametrize(
    "scales", ["none none", "tensor tensor", "rows none", "none pairs", "pairs rows", "beside rows"]
)
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, F32), (E4M3, BF16), (F16, F16)], ids=str)
def test_products_without_a_unit_round_once_a_step(dtypes, scales):
    for dtype in (F32, BF16, F16):
        for bias in (None, torch.arange(6).float() / 4, (torch.arange(6) / 4).bfloat16()):
            for rest in (None, small(4, 12, F32, 5) / 64):
                a, b = (operand(kind, rows, scale, rows, cut) for kind, rows, scale, cut in
                        zip(dtypes, (4, 6), scales.split(), (rest, None), strict=True))  # fmt: skip
                y = a.elements.double() @ b.elements.double().T
                columns, rows = b.row_scales(), a.row_scales()
                y = y if columns is None else rounded(y * columns.double().mT)
                y = y if rows is None else rounded(y * rows.double())
                if rest is not None:
                    y = rounded(y + (rest @ b.values(F32).T).double())
                y = y if bias is None else rounded(y + bias.double())
                assert_same_bits(multiply(a, b, bias, dtype), y.to(dtype))


def test_sums_of_integers_are_exact():
    """Of 2**17 products of 127 by 127 float32 loses last bits, whatever the order."""
    x, w = torch.full((2, 1 << 17), 127.0), torch.full((3, 1 << 17), 127.0)
    x[0, 1::7], w[1, ::3] = 126.0, -125.0
    y = EmulatedGEMM.apply(x, w, None, linear_config(x="int8", w="int8", g=None))
    assert_same_bits(y, (x.double() @ w.double().T).float())
    assert not torch.equal(y, x @ w.T)


@pytest.mark.parametrize("format", ["int3", "int8", "int8_full", "uint8", "int16", "mxint8"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (32, 64, 32), (33, 1100, 40), (17, (1 << 16) + 9, 2)])
def test_a_gpu_multiplies_integers_in_its_int8_units(format, shape, monkeypatch):
    """What cuBLASLt takes: contiguous rows of eight numbers, of the second matrix as columns; float64 has the bits."""
    (m, k, n), sizes, call = shape, [], torch._int_mm

    def int_mm(x, w):
        sizes.append((*x.shape, w.shape[1]))
        assert x.is_contiguous() and w.mT.is_contiguous() and x.dtype == w.dtype == torch.int8
        return call(x, w)

    torch.manual_seed(k)
    fmt = get_format(format)
    fmt = getattr(fmt, "element", fmt)
    values = torch.cat([torch.randn(m, k) / 3, torch.full((n, k), fmt.max)])
    values[m:, ::3] = fmt.min
    a, b = (Operand(quantize(v * fmt.max, fmt), Quantizer(format=fmt)) for v in values.split([m, n]))
    exact = (a.elements.double() @ b.elements.double().T).float()
    monkeypatch.setattr(torch, "_int_mm", int_mm)
    assert_same_bits(multiply(a, b, None, F32), exact)
    assert not sizes
    monkeypatch.setattr("fmtsim.gemm.layers.multiply.is_on_gpu", lambda t: True)
    assert_same_bits(multiply(a, b, None, F32), exact)
    assert sizes and all(size[0] > 16 and not size[1] % 8 and not size[2] % 8 for size in sizes)


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("factor", [None, torch.tensor(0.75)])
@pytest.mark.parametrize(
    "quantizer",
    [
        Quantizer(format=get_format("mxfp4")),
        Quantizer(format=get_format("e4m3"), scaling=Scaling(block=(None, None))),
        Quantizer(format=get_format("e2m1"), transforms=(Hadamard(size=4),)),
    ],
    ids=str,
)
def test_an_observer_sees_what_is_rounded_and_what_became_of_it(quantizer, dim, factor, dtype):
    """The tensor itself where it is only cast, else what the scales are measured on; blocks run along ``dim``."""
    seen, t = [], small(8, 12, BF16, 1).to(dtype)
    layer = Layer(LinearConfig(fprop=Gemm(a=quantizer)))
    watchers = (CallObserver(lambda *given: seen.append(given)),)
    made = _Pass(layer, Lane(watchers), t, t.dtype, (8, 12, 12)).operand("x_f", t, dim, factor)
    ((name, x, values, own, along),) = seen
    assert (name, own) == ("x_f", quantizer)
    rows = t if dim == -1 else t.mT
    rows = rows if factor is None else rows.float() * factor
    wide = F64 if dtype == F64 else F32
    if quantizer.transforms:
        h = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).double() / 2
        rows = (rows.double().reshape(-1, 4) @ h).view(rows.shape).float()
    if quantizer.is_cast and factor is None:
        assert along == dim and x is t
        assert_same_bits(values, quantize(t, "mxfp4", dim=dim, pad=True, out_dtype=wide))
    else:
        assert along == -1
        assert_same_bits(x.double(), rows.double())
        assert_same_bits(values, made.values(wide))


class Noting(torch.Tensor):
    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("which", ["x", "w", "neither"])
def test_operands_are_operators_where_either_tensor_is_not_plain(which):
    """A subclass, as a compiler's tracer, sees one operation an operand; plain tensors take the engine directly."""
    x, w = (small(rows, 32, BF16, rows) for rows in (4, 6))
    layer = Layer(
        LinearConfig(fprop=Gemm(a=Quantizer(format=get_format("mxfp4")), b=Quantizer(format=get_format("e4m3"))))
    )
    expected = run_layer(x, w, None, layer)
    Noting.seen.clear()
    given = [t.as_subclass(Noting) if name == which else t for name, t in (("x", x), ("w", w))]
    y = run_layer(*given, None, layer)
    assert_same_bits(y.as_subclass(torch.Tensor), expected)
    assert any("quantize_operand" in name for name in Noting.seen) == (which != "neither")


E5M2_QUANTIZER, E4M3_SCALED = (
    Quantizer(format=get_format("e5m2")), Quantizer(format=get_format("e4m3"), scaling=Scaling(block=(1, None)))
)  # fmt: skip
# What elements are stored in: on a CPU for a unit, and with scales multiplied in; the same on a GPU.
STORED = [
    (Quantizer(), BF16, (BF16, BF16, BF16, BF16)),
    (Quantizer(transforms=(Hadamard(),)), BF16, (F32, F32, F32, F32)),
    (E5M2_QUANTIZER, BF16, (E5M2, F32, E5M2, BF16)),
    (E5M2_QUANTIZER, F64, (E5M2, F64, E5M2, BF16)),
    (Quantizer(format=get_format("fp16")), F64, (F16, F64, F16, F64)),
    (Quantizer(format=get_format("fp16"), transforms=(Hadamard(),)), F64, (F16, F32, F16, F32)),
    (Quantizer(format=get_format("e2m1")), F32, (E4M3, F32, E4M3, BF16)),
    (Quantizer(format=get_format("e2m3")), F32, (E4M3, F32, E4M3, BF16)),
    (Quantizer(format=get_format("e3m4")), F32, (F32, F32, F32, BF16)),
    (Quantizer(format=get_format("int8"), scaling=Scaling(block=(1, None))), F32, (F32, F32, BF16, BF16)),
    (Quantizer(format=get_format("int8")), F16, (F32, F32, F32, BF16)),
    (E4M3_SCALED, F32, (E4M3, E4M3, BF16, BF16)),
    (Quantizer(format=get_format("fp16"), scaling=Scaling(block=(1, None))), F32, (F16, F16, F16, F16)),
    (Quantizer(format=get_format("mxfp4")), F64, (E4M3, F64, E4M3, BF16)),
    (Quantizer(format=get_format("mxfp8_e5m2")), F32, (E5M2, F32, E5M2, BF16)),
    (Quantizer(format=get_format("int8_channel")), F32, (F32, F32, F32, F32)),
    (Quantizer(format=get_format("e3m4"), then=E4M3_SCALED), F32, (E4M3, E4M3, BF16, BF16)),
    (Quantizer(format=get_format("e3m4"), then=E5M2_QUANTIZER), F64, (E5M2, F32, E5M2, BF16)),
]


@pytest.mark.parametrize(("quantizer", "dtype", "expected"), STORED, ids=str)
def test_what_elements_are_stored_in(quantizer, dtype, expected):
    found = [elements_dtype(quantizer, dtype, on_gpu, folded) for on_gpu in (False, True) for folded in (False, True)]
    assert tuple(found) == expected


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("compensated", [False, True])
def test_what_the_kernel_of_groups_leaves_to_be_added(compensated, dtype, biased, monkeypatch):
    """It adds a bias and writes float32 and bfloat16, unless a correction comes in between."""
    asked = []

    class Engine:
        def covers_groups(self, a, b):
            return True

        def finish(self, *given):
            return None

        def multiply_groups(self, a, b, bias, dtype):
            asked.append((bias, dtype))
            return torch.full((4, 6), 2.0, dtype=dtype)

    monkeypatch.setattr(multiply_module, "fused_engine", lambda t: Engine())
    a, b = (Operand(torch.ones(rows, 12), Quantizer(), torch.ones(rows, 2), block=(1, 6)) for rows in (4, 6))
    a, bias = a._replace(rest=torch.full((4, 12), 0.5) if compensated else None), torch.ones(6) if biased else None
    y = multiply(a, b, bias, dtype)
    whole = dtype != F16 and not compensated
    assert asked == [(bias if whole else None, dtype if whole else F32)]
    expected = 2.0 + 6 * compensated + (0 if whole else biased)
    assert_same_bits(y, torch.full((4, 6), expected, dtype=dtype))


FORWARD_CODES = LinearConfig(
    fprop=Gemm(a=Quantizer(format="e4m3"), b=Quantizer(format="e4m3")),
    dgrad=Gemm(a=Quantizer(format="e5m2"), b=Quantizer(source="forward")),
)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_backward_pass_under_autocast_takes_the_weight_that_the_forward_pass_cast(dtype):
    for config, casts in ((linear_config(x="mxfp8", w="mxfp8", g="mxfp8", scaling=None), 1), (FORWARD_CODES, 0)):
        x, w = (torch.randn(rows, 64, requires_grad=True) for rows in (32, 96))
        x_cast, w_cast = (t.detach().to(dtype).requires_grad_() for t in (x, w))
        g = torch.randn(32, 96, dtype=dtype)
        with torch.autocast("cpu", dtype):
            y = EmulatedGEMM.apply(x, w, None, config)
        assert sum(t is not None and torch.equal(t, w_cast) for t in y.grad_fn.saved_tensors) == casts
        expected = EmulatedGEMM.apply(x_cast, w_cast, None, config)
        for results, t in ((y, x), (expected, x_cast)):
            results.backward(g)
            assert t.grad.dtype == t.dtype
        assert_same_bits(y, expected, what="y")
        assert_same_bits(x.grad, x_cast.grad.float(), what="x's gradient")
        assert_same_bits(w.grad, w_cast.grad.float(), what="w's gradient")


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=4)), ids=str)
def test_products_are_finished_by_the_factors_and_terms_that_there_are(present, dtype, traced):
    """One rounding an operation, in float32 and this order: columns, rows, the rest, the bias, the dtype."""
    parts = (normal(33, 1, seed=2), normal(17, 1, seed=3), normal(17, 33, seed=4), normal(33, seed=5))
    columns, rows, rest, bias = (part if there else None for part, there in zip(parts, present, strict=True))
    y = normal(17, 33, seed=1)
    wanted = y.clone()
    if columns is not None:
        wanted = wanted * columns.mT
    if rows is not None:
        wanted = wanted * rows
    if rest is not None:
        wanted = wanted + rest
    if bias is not None:
        wanted = wanted + bias
    used = y.clone()
    found = finish_sums(used, columns, rows, rest, bias, dtype, traced)
    assert_same_bits(found, wanted.to(dtype))
    assert (found is used) <= (dtype == torch.float32)
    if not any(present) and dtype == torch.float32:
        assert found is used


@pytest.mark.parametrize("scaling", ["tensor", "none"])
def test_a_weight_may_be_quantised_before_autocast_casts_it(scaling):
    """The bits of float32 products of what x becomes in bfloat16 and of w as it is, each result rounded once."""
    config = linear_config(x="e4m3", w="e4m3", g="e5m2", scaling=scaling)
    config, x, w = dataclasses.replace(config, casts_weight=False), normal(32, 48, seed=1), normal(16, 48, seed=2) / 3
    x_cast, g, results = x.to(BF16).float(), normal(32, 16, seed=3).to(BF16), []
    for inputs, how, enabled in (
        (x, config, True),
        (x_cast, config, False),
        (x, dataclasses.replace(config, casts_weight=True), True),
    ):
        leaves = inputs.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast("cpu", BF16, enabled=enabled):
            y = EmulatedGEMM.apply(*leaves, None, how)
        results.append([t.to(BF16) for t in (y.detach(), *torch.autograd.grad(y, leaves, g.to(y.dtype)))])
    for one, other in zip(*results[:2], strict=True):
        assert_same_bits(one, other)
    assert not torch.equal(results[0][0], results[2][0])  # that quantises w's cast
