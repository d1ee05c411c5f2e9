# SPDX-License-Identifier: Apache-2.0
"""Every way of a cast gives the same bits: values, out=, in place, codes; of views, any dim, dtypes, empty tensors."""

import itertools
import operator

import pytest
import torch

import fmtsim
from fmtsim import decode, encode, quantize, quantize_
from fmtsim.casts import ops
from tests.support.bits import assert_same_bits
from tests.support.operands import DTYPES, normal, wide

FORMATS = ["e4m3", "e2m1", "e3m2", "fp16", "fp64", "int8", "int4_half", "uint5", "nf4", "lns8_g8", "mxfp4",
           "mxfp6_e2m3", "mxint8", "nvfp4", "e4m3_128x128", "int8_channel", "uint4_g32_zp", "nf4_g64", "logfmt8",
           "e4m3_tensor", "int8_tensor"]  # fmt: skip
STOCHASTIC = {"rounding": "stochastic", "generator": 11}
OPTIONS = [{}, STOCHASTIC, {"rounding": "toward_zero", "overflow": "ieee"}]

pytestmark = pytest.mark.usefixtures("one_thread")


def views() -> dict[str, torch.Tensor]:
    """Return tensors that lie in memory in every way, with special numbers in the first rows; empty ones, a scalar."""
    base = wide(6, 64, 10)
    base[0, 0, 0], base[0, 1, 3], base[0, 2, 2], base[0, 3, 3] = 0.0, -0.0, torch.inf, torch.nan
    return {
        "contiguous": base,
        "transposed": base.transpose(0, 1),
        "permuted": base.permute(2, 0, 1),
        "stepped": base[::2, ::2, ::3],
        "shifted": base[1:, 1:33, 2:],
        "one column": base[:, :, 3],
        "expanded": base[:1].expand(4, 64, 10),
        "scalar expanded": base[0, 0, 1].expand(5, 32),
        "diagonal": base.diagonal(0, 0, 2),
        "row": base[0, 0],
        "scalar": torch.tensor(1.3),
        **{f"empty {shape}": torch.empty(shape) for shape in ((0,), (0, 128), (32, 0), (2, 0, 3), (0, 0))},
    }


def cases():
    """Yield views, dims, dtypes of x and of the result, and options, the latter three in turn."""
    turn = itertools.count()
    for what, x in views().items():
        for dim in range(-max(x.dim(), 1), max(x.dim(), 1)):
            i, dtypes = next(turn), list(DTYPES.values())
            yield f"{what} dim={dim}", x.to(dtypes[i % 4]), dim, dtypes[i // 4 % 4], OPTIONS[i % 3]


@pytest.mark.parametrize("name", FORMATS)
def test_every_way_gives_the_same_bits(name):
    for what, x, dim, dtype, options in cases():
        options = {"dim": dim, "pad": True, **options}
        before, version, solid = x.clone(), x._version, x.contiguous()
        expected = quantize(solid, name, out_dtype=dtype, **options)
        assert_same_bits(quantize(x, name, out_dtype=dtype, **options), expected, solid, what=what)
        # Results of any strides, beside which nothing is written.
        frame = torch.full((*x.shape, 2), 7.0, dtype=dtype)
        turned = torch.empty_like(solid.mT if x.dim() > 1 else solid, dtype=dtype)
        for out in (torch.empty(x.shape, dtype=dtype), turned.mT if x.dim() > 1 else turned, frame[..., 1]):
            assert quantize(x, name, out=out, **options) is out
            assert_same_bits(out, expected, solid, what=f"{what} into strides {out.stride()}")
        assert bool((frame[..., 0] == 7.0).all())
        # Codes.
        q = encode(x, name, **options)
        assert q.shape == x.shape and q.dim == (dim if dim < 0 else dim - max(x.dim(), 1))
        assert (q.nbytes == 0) == (x.numel() == 0) or "nvfp4" in name or "tensor" in name
        for decoded in (q.decode(out_dtype=dtype), decode(q, out_dtype=dtype)):
            assert_same_bits(decoded, expected, solid, what=f"{what} decoded")
        # x has kept its bits, and no autograd history begins; then it is overwritten.
        assert_same_bits(x, before, what=what)
        assert x._version == version and not expected.requires_grad
        if "expanded" not in what:
            assert quantize_(x, name, **options) is x
            in_place = quantize(before.contiguous(), name, out_dtype=x.dtype, **options)
            assert_same_bits(x.contiguous(), in_place, solid, what=f"{what} in place")


@pytest.mark.parametrize("name", FORMATS)
def test_a_scalar_is_a_row_of_one_element(name):
    """Its block is cut short, also without pad=True; results have the dtypes of any tensor's."""
    x = torch.tensor(1.3)
    row = quantize(x.view(1), name, pad=True)
    for y in (quantize(x, name), quantize(x, name, dim=0), quantize_(x.clone(), name)):
        assert y.shape == ()
        assert_same_bits(y.view(1).to(row.dtype), row.float().to(row.dtype), what=name)  # in place x keeps its dtype
    assert decode(encode(x, name)).dtype == (torch.float64 if name == "fp64" else torch.float32)
    empty, full = (quantize(t.bfloat16(), name, pad=True) for t in (torch.empty(0), torch.ones(1)))
    assert empty.dtype == full.dtype


def test_in_place_takes_the_options_of_quantize():
    x = wide(4, 66)
    options = {"block_size": 16, "scale_rule": "floor", "pad": True, "dim": 0, **STOCHASTIC}
    expected = quantize(x, "e2m1", **options)
    assert_same_bits(quantize_(x, "e2m1", **options), expected, what="quantize_")


@pytest.mark.parametrize("name", ["e4m3", "nf4", "mxfp4", "nvfp4", "logfmt8"])
def test_overlapping_input_and_output(name):
    """x and out that share memory without being the same tensor: as if x had been copied first."""
    pairs = {
        "later": lambda m: (m[:-1], m[1:]),
        "earlier": lambda m: (m[1:], m[:-1]),
        "turned": lambda m: (m[:32], m[:32].T),
        "interleaved": lambda m: (m[:32:2], m[1:32:2]),
        "narrower": lambda m: (m[:4], m.view(torch.bfloat16)[2:6, ::2]),
        "wider": lambda m: (m.view(torch.float16)[:8, :32], m[:8]),
        "one row for all": lambda m: (m[3:4].expand(8, 32), m[:8]),
    }
    for what, pair in pairs.items():
        memory = torch.rand(33, 32, generator=torch.Generator().manual_seed(5)) * 4 + 1
        x, out = pair(memory)
        expected = quantize(x.clone(), name, pad=True, out_dtype=out.dtype)
        quantize(x, name, pad=True, out=out)
        assert_same_bits(out.contiguous(), expected, what=what)


def test_the_bytes_that_a_tensor_lies_in():
    memory = torch.zeros(8, 9, 10, dtype=torch.bfloat16)
    views = [memory, memory.mT, memory[1:, ::2, 3:7], memory[:, :, 5], memory[2, 3, 4], memory[:1].expand(4, 9, 10),
             memory[3:3], memory[:, 4:4, ::3], memory.view(torch.uint8)[1::3, 2, 5::2]]  # fmt: skip
    for view in views:
        places = [sum(map(operator.mul, place, view.stride())) for place in itertools.product(*map(range, view.shape))]
        first, size = view.data_ptr(), view.element_size()
        behind = first + (max(places) + 1) * size if places else first
        assert ops._span(view) == (first, behind)
    whole = torch.zeros(4, 8)
    assert not ops._overlap(whole[:2], whole[2:]) and not ops._overlap(whole[2:], whole[:2])
    assert ops._overlap(whole[:3], whole[2:]) and ops._overlap(whole[2:], whole[:3])
    assert not ops._overlap(whole, whole) and not ops._overlap(whole[:2], whole.view(4, 8)[:2])
    assert ops._overlap(whole, whole.view(torch.int32)) and ops._overlap(whole[:2, :4], whole[:2, 4:])


def test_out_that_overlaps_itself():
    memory = torch.zeros(16)
    out = memory.as_strided((3, 4), (2, 1))
    with pytest.raises(fmtsim.errors.ArgumentError, match="holds several elements in one place; pass out.contiguous"):
        quantize(normal(3, 4), "e4m3", out=out)
    assert not memory.any()


@pytest.mark.parametrize("name", ["e4m3", "mxfp4", "int8_channel"])
def test_channels_last_stays_channels_last(name):
    x = wide(2, 32, 5, 4).to(memory_format=torch.channels_last)
    for options in ({}, STOCHASTIC):
        y = quantize(x, name, dim=1, **options)
        assert_same_bits(y, quantize(x.contiguous(), name, dim=1, **options), what=name)
        assert y.is_contiguous(memory_format=torch.channels_last)
    volume = wide(2, 32, 3, 2, 2).to(memory_format=torch.channels_last_3d)
    assert_same_bits(quantize(volume, name, dim=1), quantize(volume.contiguous(), name, dim=1), what=name)


def test_results_lie_in_memory_as_their_input_does():
    for x in (wide(4, 8).T, wide(4, 8, 2).permute(1, 2, 0)):
        assert quantize(x, "e4m3").stride() == x.stride()
    for x in (wide(4, 8)[:, ::2], wide(1, 8).expand(4, 8)):
        assert quantize(x, "e4m3").is_contiguous()


def lazily_negated():
    """Return views whose memory holds the negative of what they say, and the tensor behind the second."""
    x = normal(4, 64)
    pairs = torch.complex(normal(4, 64, seed=1), x)
    return [(torch._neg_view(-x), None), (pairs.conj().imag, pairs)]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", ["e2m1", "mxfp4"])
def test_lazily_negated_tensors(which, name):
    """Negated and conjugated views keep a flag instead of data."""
    view, base = lazily_negated()[which]
    assert view.is_neg()
    expected = quantize(view.resolve_neg().clone(), name)
    assert_same_bits(quantize(view, name).resolve_neg(), expected, what="x")
    assert_same_bits(encode(view, name).decode(), expected, what="encoded")
    assert fmtsim.compare(view, view.resolve_neg()).equal
    for out in (torch._neg_view(torch.zeros(4, 64)), torch.empty(4, 64, dtype=torch.complex64).imag):
        assert quantize(view.resolve_neg(), name, out=out) is out
        assert_same_bits(out.resolve_neg().contiguous(), expected, what="out")
    assert quantize_(view, name) is view and view.is_neg()
    assert_same_bits(view.resolve_neg(), expected, what="in place")
    if base is not None:
        assert_same_bits(base.imag, -expected, what="the tensor that it is a view of")


def test_parameters_buffers_subclasses_and_gradients():
    class Tagged(torch.Tensor):
        pass

    x = wide(4, 64)
    for tensor in (torch.nn.Parameter(x), x.as_subclass(Tagged), torch.nn.Buffer(x)):
        assert_same_bits(quantize(tensor, "e4m3").detach().as_subclass(torch.Tensor), quantize(x, "e4m3"), what="e4m3")
    q = encode(x.clone().requires_grad_(), "nvfp4")
    assert not q.decode().requires_grad
    assert all(not part.requires_grad for part in q.parts() if part is not None)


def test_meta_tensors_have_shapes_only():
    x = torch.empty(4, 64, device="meta", dtype=torch.bfloat16)
    for name, dtype in (("e4m3", torch.bfloat16), ("nvfp4", torch.float32)):
        y = quantize(x, name)
        assert (y.device.type, y.shape, y.dtype) == ("meta", x.shape, dtype)
    assert quantize_(x, "mxfp4") is x


def test_default_dtype_is_not_looked_at():
    x, before = wide(2, 64), torch.get_default_dtype()

    def results():
        return quantize(x, "nvfp4"), encode(x, "nvfp4").decode(), encode(x, "e4m3").decode()

    expected = results()
    try:
        torch.set_default_dtype(torch.float64)
        for ours, theirs in zip(results(), expected, strict=True):
            assert_same_bits(ours, theirs, what="float64 by default")
    finally:
        torch.set_default_dtype(before)
