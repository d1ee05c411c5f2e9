# SPDX-License-Identifier: Apache-2.0
"""quantize and quantize_ on every kind of tensor: shapes, strides, dims, blocks, dtypes, out=, overlapping memory."""

import itertools

import pytest
import torch

import fmtsim
from fmtsim import quantize, quantize_
from tests.support.bits import assert_same_bits, stored
from tests.support.operands import DTYPES, normal, wide

ELEMENTS = ["e4m3", "int8", "nf4", "lns8_g8"]
SCALED = ["mxfp4", "nvfp4", "e4m3_128x128", "int8_channel", "uint4_g32_zp", "logfmt8"]
STOCHASTIC = {"rounding": "stochastic", "generator": 11}


pytestmark = pytest.mark.usefixtures("one_thread")


def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of a tensor of shape [6, 64, 10] that are not contiguous."""
    return {
        "transposed": base.transpose(0, 1),
        "permuted": base.permute(2, 0, 1),
        "stepped": base[::2, ::2, ::3],
        "shifted": base[1:, 1:33, 2:],
        "one column": base[:, :, 3],
        "expanded": base[:1].expand(4, 64, 10),
        "scalar expanded": base[0, 0, 0].expand(5, 32),
        "diagonal": base.diagonal(0, 0, 2),
    }


# Results.


def test_a_few_known_values():
    x = torch.tensor([0.1, 500.0, -0.0, float("nan"), float("inf"), 464.0, 2.0**-10])
    expected = torch.tensor([0.1015625, 448.0, -0.0, float("nan"), 448.0, 448.0, 0.0])
    assert_same_bits(quantize(x, "e4m3"), expected, x, what="e4m3")
    ieee = quantize(x, "e5m2", overflow="ieee")
    assert ieee.tolist()[4] == float("inf")
    assert quantize(torch.tensor([7.0, 3.5, -3.5]), torch.float8_e5m2).tolist() == [7.0, 3.5, -3.5]


@pytest.mark.parametrize("name", [*ELEMENTS, *SCALED])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_the_input_keeps_its_bits_and_its_history(name, dtype):
    x = wide(4, 128, dtype=dtype)
    before, version = x.clone(), x._version
    y = quantize(x, name, pad=True)
    assert_same_bits(x, before, what=name)
    assert x._version == version and not y.requires_grad and y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("name", [*ELEMENTS, *SCALED])
def test_quantising_twice_changes_nothing_in_element_formats(name):
    x = wide(4, 128)
    once = quantize(x, name, pad=True)
    twice = quantize(once, name, pad=True)
    if name in ELEMENTS or name == "mxfp4":
        assert_same_bits(twice, once, x, what=name)
    else:
        assert (twice - once).abs().max() <= (once - x).abs().max()


# Result dtype (docs/semantics.md, section 10).

RESULT = [
    ("e4m3", "float32", "float32"),
    ("e4m3", "bfloat16", "bfloat16"),
    ("e4m3", "float16", "float16"),
    ("e4m3", "float64", "float64"),
    ("e5m2", "float16", "float16"),
    ("e5m6", "bfloat16", "bfloat16"),
    ("e4m7", "bfloat16", "bfloat16"),
    ("e4m8", "bfloat16", "float32"),
    ("bf16", "float16", "float32"),
    ("fp16", "bfloat16", "float32"),
    ("tf32", "bfloat16", "float32"),
    ("fp32", "float16", "float32"),
    ("fp64", "bfloat16", "float64"),
    ("fp64", "float32", "float64"),
    ("int8", "bfloat16", "bfloat16"),
    ("int16", "float16", "float32"),
    ("nf4", "float16", "float32"),
    ("lns8_g8", "bfloat16", "float32"),
    ("e8m0", "bfloat16", "bfloat16"),
    ("e8m0", "float16", "float32"),
    ("mxfp4", "bfloat16", "bfloat16"),
    ("mxfp4", "float16", "float32"),
    ("mxfp8_e4m3", "bfloat16", "bfloat16"),
    ("mxint8", "bfloat16", "bfloat16"),
    ("mxfp4", "float64", "float64"),
    ("nvfp4", "bfloat16", "float32"),
    ("nvfp4", "float64", "float64"),
    ("int8_channel", "float16", "float32"),
    ("logfmt8", "bfloat16", "float32"),
]


@pytest.mark.parametrize(("name", "given", "expected"), RESULT)
def test_result_dtype(name, given, expected):
    x = wide(2, 128, dtype=DTYPES[given])
    y = quantize(x, name)
    assert (y.dtype, y.shape, y.device) == (DTYPES[expected], x.shape, x.device)
    exact = quantize(x, name, out_dtype=torch.float64)
    assert_same_bits(y, exact.to(y.dtype), x, what=name)
    fmt = fmtsim.get_format(name)
    if (
        not isinstance(fmt, fmtsim.formats.block.LogTileFormat)
        and getattr(fmt, "power_of_two", True)
        and name != "lns8_g8"
    ):
        assert_same_bits(y.double(), exact, x, what=f"{name} loses nothing in {expected}")


@pytest.mark.parametrize("name", ["e4m3", "fp16", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("out_dtype", DTYPES.values(), ids=list(DTYPES))
def test_out_dtype_rounds_once(name, out_dtype):
    """Out dtypes are met from the exact value: not from what x's own dtype would make of it."""
    x = torch.cat([wide(2, 64, seed=3), torch.full((1, 64), 3e38), torch.full((1, 64), 1e-6)])
    y = quantize(x, name, out_dtype=out_dtype, overflow="ieee")
    assert y.dtype == out_dtype
    assert_same_bits(y, stored(quantize(x, name, out_dtype=torch.float64, overflow="ieee"), out_dtype), x, what=name)
    out = torch.empty(x.shape, dtype=out_dtype)
    assert_same_bits(quantize(x, name, out=out, overflow="ieee"), y, x, what=name)


def test_float64_is_rounded_once():
    """1 + 2^-4 + 2^-40 is above the tie of e4m3; rounded to float32 first it would be the tie, which goes to 1."""
    x = torch.tensor([1 + 2.0**-4 + 2.0**-40], dtype=torch.float64)
    assert quantize(x, "e4m3").tolist() == [1.125]
    assert quantize(x.float(), "e4m3").tolist() == [1.0]
    assert quantize(x.repeat(32), "mxfp8_e4m3").tolist() == [1.125] * 32


def test_default_dtype_is_not_looked_at():
    before = torch.get_default_dtype()
    x = wide(2, 64)
    expected = quantize(x, "nvfp4"), fmtsim.encode(x, "nvfp4").decode(), fmtsim.encode(x, "e4m3").decode()
    try:
        torch.set_default_dtype(torch.float64)
        got = quantize(x, "nvfp4"), fmtsim.encode(x, "nvfp4").decode(), fmtsim.encode(x, "e4m3").decode()
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_bits(mine, theirs, what="float64 by default")
    finally:
        torch.set_default_dtype(before)


# Strides and out=.


@pytest.mark.parametrize("name", [*ELEMENTS, *SCALED])
def test_out_of_any_strides(name):
    for (what, x), dtype in zip(views(wide(6, 64, 10)).items(), itertools.cycle(DTYPES.values()), strict=False):
        expected = quantize(x, name, pad=True, out_dtype=dtype)
        for place in (
            x.contiguous(),
            x.transpose(0, -1).contiguous().transpose(0, -1),
            torch.zeros(*x.shape, 2)[..., 1],
        ):
            out = torch.full_like(place, 7.0, dtype=dtype)
            if place.is_contiguous() is False:
                out = torch.empty_strided(place.shape, place.stride(), dtype=dtype).fill_(7.0)
            assert quantize(x, name, pad=True, out=out) is out
            assert_same_bits(out, expected, x.contiguous(), what=f"{what} into strides {out.stride()}")


def test_what_lies_around_out_is_left_alone():
    x = wide(8, 32)
    for name in ("e4m3", "mxfp4", "nvfp4"):
        frame = torch.full((10, 40), 7.0)
        quantize(x, name, out=frame[1:9, 4:36])
        assert_same_bits(frame[1:9, 4:36], quantize(x, name), x, what=name)
        frame[1:9, 4:36] = 7.0
        assert bool((frame == 7.0).all())


@pytest.mark.parametrize("name", [*ELEMENTS, *SCALED])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_in_place(name, dtype):
    for x in (wide(6, 64, dtype=dtype), wide(64, 6, dtype=dtype).T, wide(6, 2, 64, dtype=dtype)[:, 0]):
        expected = quantize(x, name, pad=True, out_dtype=dtype)
        assert quantize_(x, name, pad=True) is x
        assert_same_bits(x, expected, what=name)


def test_in_place_takes_the_options_of_quantize():
    x = wide(4, 66)
    expected = quantize(x, "e2m1", block_size=16, scale_rule="floor", pad=True, dim=0, **STOCHASTIC)
    assert_same_bits(
        quantize_(x, "e2m1", block_size=16, scale_rule="floor", pad=True, dim=0, **STOCHASTIC),
        expected,
        what="quantize_",
    )


@pytest.mark.parametrize("name", ["e4m3", "nf4", "mxfp4", "nvfp4", "logfmt8"])
def test_overlapping_input_and_output(name):
    """x and out that share memory without being the same tensor: as if x had been copied first."""

    def cases():
        yield "later", lambda m: (m[:-1], m[1:])
        yield "earlier", lambda m: (m[1:], m[:-1])
        yield "turned", lambda m: (m[:32], m[:32].T)
        yield "interleaved", lambda m: (m[:32:2], m[1:32:2])
        yield "narrower", lambda m: (m[:4], m.view(torch.bfloat16)[2:6, ::2])
        yield "wider", lambda m: (m.view(torch.float16)[:8, :32], m[:8])
        yield "one row for all", lambda m: (m[3:4].expand(8, 32), m[:8])

    for what, cut in cases():
        memory = torch.rand(33, 32, generator=torch.Generator().manual_seed(5)) * 4 + 1
        x, out = cut(memory)
        expected = quantize(x.clone(), name, pad=True, out_dtype=out.dtype)
        quantize(x, name, pad=True, out=out)
        assert_same_bits(out.contiguous(), expected, what=what)


@pytest.mark.parametrize("name", ["e4m3", "mxfp4", "int8_channel"])
def test_channels_last_stays_channels_last(name):
    x = wide(2, 32, 5, 4).to(memory_format=torch.channels_last)
    y = quantize(x, name, dim=1)
    assert_same_bits(y, quantize(x.contiguous(), name, dim=1), what=name)
    assert y.is_contiguous(memory_format=torch.channels_last)
    noisy = quantize(x, name, dim=1, **STOCHASTIC)
    assert_same_bits(noisy, quantize(x.contiguous(), name, dim=1, **STOCHASTIC), what=name)
    volume = wide(2, 32, 3, 2, 2).to(memory_format=torch.channels_last_3d)
    assert_same_bits(quantize(volume, name, dim=1), quantize(volume.contiguous(), name, dim=1), what=name)


def test_results_lie_in_memory_as_their_input_does():
    for x in (wide(4, 8).T, wide(4, 8, 2).permute(1, 2, 0)):
        assert quantize(x, "e4m3").stride() == x.stride()
    for x in (wide(4, 8)[:, ::2], wide(1, 8).expand(4, 8)):
        assert quantize(x, "e4m3").is_contiguous()


# Empty and small.


@pytest.mark.parametrize("name", [*ELEMENTS, *SCALED, "e4m3_tensor", "int8_tensor"])
@pytest.mark.parametrize("options", [{}, STOCHASTIC], ids=["nearest", "stochastic"])
def test_tensors_without_elements(name, options):
    for shape in ((0,), (0, 32), (32, 0), (2, 0, 128), (0, 0)):
        for dim in range(-len(shape), len(shape)):
            x = torch.empty(shape, dtype=torch.bfloat16)
            y = quantize(x, name, pad=True, dim=dim, **options)
            assert y.shape == shape and y.dtype == quantize(wide(1, 1, dtype=x.dtype), name, pad=True).dtype
            out = torch.empty(shape)
            assert quantize(x, name, pad=True, dim=dim, out=out, **options) is out
            assert quantize_(x, name, pad=True, dim=dim, **options) is x


@pytest.mark.parametrize("name", [*ELEMENTS, *SCALED])
def test_tensors_without_dimensions(name):
    """A 0-d tensor is a row of one element, its block cut short; dims -1 and 0 both name that row."""
    x = torch.tensor(1.3)
    row = quantize(x.view(1), name, pad=True)
    for dim in (-1, 0):
        y = quantize(x, name, dim=dim)
        assert y.shape == ()
        assert_same_bits(y.view(1), row, what=name)
    out = torch.empty(())
    quantize(x, name, out=out)
    assert_same_bits(out.view(1), row, what=name)
    assert_same_bits(quantize_(x.clone(), name).view(1), row, what=name)


# Formats and tensors of other kinds.


def test_names_records_and_dtypes_are_the_same_format():
    x = wide(4, 64)
    expected = quantize(x, "e4m3")
    for format in (fmtsim.get_format("e4m3"), torch.float8_e4m3fn, "float8_e4m3fn", "E4M3"):
        assert_same_bits(quantize(x, format), expected, what="e4m3")
    rounding = fmtsim.Rounding(mode="to_odd")
    assert_same_bits(quantize(x, "e4m3", rounding=rounding), quantize(x, "e4m3", rounding="to_odd"), what="to_odd")


@pytest.mark.parametrize("name", ["e4m3", "mxfp4"])
def test_views_that_torch_resolves_late(name):
    """Negated and conjugated views keep a flag instead of data."""
    z = torch.complex(wide(4, 64), wide(4, 64, seed=1))
    assert_same_bits(quantize(z.conj().imag, name), quantize(-z.imag.contiguous(), name), what="imag")
    out = torch.empty(4, 64, dtype=torch.complex64)
    quantize(z.real, name, out=out.imag)
    assert_same_bits(out.imag.contiguous(), quantize(z.real.contiguous(), name), what="into imag")


def test_parameters_buffers_and_subclasses():
    class Tagged(torch.Tensor):
        pass

    x = wide(4, 64)
    for given in (torch.nn.Parameter(x), x.as_subclass(Tagged), torch.nn.Buffer(x)):
        assert_same_bits(quantize(given, "e4m3").detach().as_subclass(torch.Tensor), quantize(x, "e4m3"), what="e4m3")


def test_meta_tensors_have_shapes_only():
    x = torch.empty(4, 64, device="meta", dtype=torch.bfloat16)
    for name, dtype in (("e4m3", torch.bfloat16), ("nvfp4", torch.float32)):
        y = quantize(x, name)
        assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, dtype)
    assert quantize_(x, "mxfp4") is x


def lazily_negated():
    """Views whose memory holds the negative of what they say, as a tensor and its base."""
    x = normal(4, 64)
    pairs = torch.complex(normal(4, 64, seed=1), x)
    return [(torch._neg_view(-x), None), (pairs.conj().imag, pairs)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["e2m1", "mxfp4"])
def test_lazily_negated_tensors(which, name):
    view, base = lazily_negated()[which]
    assert view.is_neg()
    expected = quantize(view.resolve_neg().clone(), name)
    assert_same_bits(quantize(view, name).resolve_neg(), expected, what="x")
    assert_same_bits(fmtsim.encode(view, name).decode(), expected, what="encoded")
    assert fmtsim.compare(view, view.resolve_neg()).equal
    out = torch._neg_view(torch.zeros(4, 64))
    assert quantize(view.resolve_neg(), name, out=out) is out
    assert_same_bits(out.resolve_neg(), expected, what="out")
    assert quantize_(view, name) is view and view.is_neg()
    assert_same_bits(view.resolve_neg(), expected, what="in place")
    if base is not None:
        assert_same_bits(base.imag, -expected, what="the tensor that it is a view of")


def test_out_that_overlaps_itself():
    memory = torch.zeros(16)
    out = memory.as_strided((3, 4), (2, 1))
    with pytest.raises(fmtsim.errors.ArgumentError, match="holds several elements in one place; pass out.contiguous"):
        quantize(normal(3, 4), "e4m3", out=out)
    assert not memory.any()
    spaced = torch.zeros(3, 8)[:, ::2]
    assert quantize(normal(3, 4), "e4m3", out=spaced) is spaced and spaced.any()
