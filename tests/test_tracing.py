# SPDX-License-Identifier: Apache-2.0
"""Verbs where torch shows them no numbers: compiled without a break, exported, mapped over a batch, fake, on meta."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fmtsim
from fmtsim import compare, decode, encode, mma, quantize_, scaled_mm
from fmtsim.support import dispatch
from fmtsim.support.errors import ArgumentError, CodeError
from tests.support.bits import assert_same_bits
from tests.support.operands import normal
from tests.support.refusals import refused

BF16 = torch.bfloat16


def float8(rows=128, seed=0):
    return fmtsim.encode(normal(rows, 128, seed=seed), "e4m3").codes.view(torch.float8_e4m3fn)


def codes(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def product(a, b, scale_a, scale_b, unit="hopper.wgmma"):
    return scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=BF16, target=unit)


ONE = torch.tensor(0.5)
MX = codes(128 * 4, low=120, high=130).view(torch.float8_e8m0fnu)
NV = codes(128 * 8, low=40, high=60).view(torch.float8_e4m3fn)
FP4 = codes(128, 64).view(torch.float4_e2m1fn_x2)
CASES = {
    "encode": (lambda x: encode(x, "e3m2").codes, (normal(3, 40),)),
    "encode and decode": (lambda x: encode(x, "nvfp4").decode(out_dtype=BF16), (normal(3, 64),)),
    "decode": (lambda x: decode(x, "e2m1"), (codes(5, high=16),)),
    "decode float8": (lambda x: decode(x), (float8(),)),
    "scaled_mm": (product, (float8(), float8(seed=1), ONE, ONE)),
    "scaled_mm by rows": (product, (float8(), float8(seed=1), torch.rand(128, 1), torch.rand(1, 128))),
    "scaled_mm mx": (lambda *x: product(*x, unit="blackwell.tcgen05.mxf8f6f4"), (float8(), float8(seed=1), MX, MX)),
    "scaled_mm nvfp4": (lambda *x: product(*x, unit="blackwell.tcgen05.nvf4"), (FP4, FP4, NV, NV)),
    "mma": (lambda a, b, c: mma(a, b, c, target="hopper.wgmma"), (float8(), float8(seed=1), torch.zeros(128, 128))),
}


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


@pytest.mark.parametrize("case", CASES)
def test_traced_verbs_have_their_bits(case):
    function, inputs = CASES[case]
    expected = function(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    assert_same_bits(compiled(*inputs), expected, what="compiled")
    exported = torch.export.export(Module(function), inputs).module()
    assert_same_bits(exported(*inputs), expected, what="exported")
    stacks = [x.unsqueeze(0).expand(2, *x.shape) for x in inputs]
    mapped = torch.vmap(function)(*stacks)
    for row in mapped:
        assert_same_bits(row, expected, what="mapped")
    with FakeTensorMode() as mode:
        fake = function(*map(mode.from_tensor, inputs))
    for empty in (fake, function(*(x.to("meta") for x in inputs))):
        assert (empty.shape, empty.dtype) == (expected.shape, expected.dtype)


def test_traced_verbs_look_at_numbers_when_they_run():
    torch._dynamo.reset()
    with pytest.raises(CodeError, match="^code 16 is outside e2m1; its codes are 0 to 15$"):
        torch.compile(lambda x: decode(x, "e2m1"), fullgraph=True, backend="eager")(codes(3, low=16, high=17))
    message = "^scale_b holds -1; scales are finite and not negative$"
    with pytest.raises(ArgumentError, match=message):
        torch.compile(product, fullgraph=True, backend="eager")(float8(), float8(), ONE, torch.tensor(-1.0))
    with pytest.raises(ArgumentError, match=message):
        torch.vmap(product)(*(x.unsqueeze(0) for x in (float8(), float8(), ONE, torch.tensor(-1.0))))


def test_an_empty_batch_is_mapped():
    assert torch.vmap(lambda x: encode(x, "nvfp4").decode())(torch.empty(0, 64)).shape == (0, 64)
    assert torch.vmap(lambda x: encode(x, "e2m1").codes)(torch.empty(0, 64)).shape == (0, 32)


def test_in_place_under_vmap_and_compile():
    x = normal(4, 8)
    expected = fmtsim.quantize(x, "e2m1")
    assert_same_bits(torch.vmap(lambda row: quantize_(row, "e2m1"))(x.clone()), expected, what="mapped")
    torch._dynamo.reset()
    given = x.clone()
    torch.compile(lambda y: quantize_(y, "e2m1"), fullgraph=True, backend="aot_eager")(given)
    assert_same_bits(given, expected, what="compiled")


def test_what_needs_numbers_says_so(tmp_path):
    meta = torch.empty(4, 32, device="meta")
    refused("^actual is on meta, so it has no numbers to look at; pass a tensor on a", compare, meta, meta)
    with pytest.raises(ArgumentError, match="^the encoded tensor is on meta, so it has no numbers"):
        encode(meta, "nvfp4").save(tmp_path / "x")
    assert not list(tmp_path.iterdir())
    with FakeTensorMode(), pytest.raises(ArgumentError, match="^actual is fake, or traced by torch.compile, "):
        compare(torch.ones(3), torch.ones(3))


class Subclass(torch.Tensor):
    """A tensor by another name."""


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x, y: fmtsim.linear(x, y, target="exact"), "w"),
        (lambda x, y: mma(x, y, target="exact"), "b"),
        (lambda x, y: mma(x, x, y, target="exact"), "c"),
        (lambda x, y: fmtsim.distributed.simulate([x, y], "bf16"), "rank 1"),
        (lambda x, y: fmtsim.distributed.simulate([[x, y]], "bf16"), "tensor 1"),
        (lambda x, y: fmtsim.quantize_(x, "e4m3", rounding="stochastic", random_words=y.long()), "random_words"),
        (lambda x, y: fmtsim.quantize(x, "e4m3", out=y), "out"),
        (lambda x, y: encode(x, "e4m3").decode(out=y), "out"),
        (lambda x, y: dataclasses.replace(encode(x, "int8_channel"), scales=y[:, :1]), "scales"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("Subclass", lambda x: x.as_subclass(Subclass)),
        ("FakeTensor", lambda x: FakeTensorMode().from_tensor(x)),
        ("Tensor", lambda x: x),
    ],
)
def test_what_torch_does_not_take_beside_a_fake_tensor_is_named(call, name, kind, make):
    fake = FakeTensorMode(allow_non_fake_inputs=kind != "Tensor").from_tensor(torch.ones(4, 4))
    with pytest.raises(ArgumentError, match=f"^{name} is a {kind} beside a fake tensor, and torch does not take both"):
        call(fake, make(torch.ones(4, 4)))


def test_a_plain_tensor_beside_a_fake_one_of_a_mode_that_takes_it():
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(torch.ones(4, 4))
    assert fmtsim.linear(fake, torch.ones(2, 4), target="exact").shape == (4, 2)


def test_functions_are_constants_where_torch_takes_no_objects_for_them(monkeypatch):
    """Before torch 2.13 a compiler gives a function that it calls while it traces no formats, plans or generators."""
    monkeypatch.setattr(dispatch, "_TAKES_OBJECTS", False)
    seen = []

    @dispatch.constant_in_graphs
    def number_of(fmt, several, *, dtype=None):
        seen.append((fmt, several, dtype))
        return fmt.bits

    def times(x, fmt):
        return x * number_of(fmt, (fmt, "name", (3, None)), dtype=BF16)

    compiled = torch.compile(times, fullgraph=True, backend="eager")
    x, formats = torch.ones(2), [fmtsim.get_format(name) for name in ("e4m3", "e2m1", "e4m3")]
    for fmt in formats:
        assert torch.equal(compiled(x, fmt), times(x, fmt))
    assert len(seen) == 2 + 3  # a graph for each format, and those that no compiler saw
    assert all(rest == (got, "name", (3, None)) and rest[0] is got and dtype is BF16 for got, rest, dtype in seen)
    assert {id(got) for got, _, _ in seen} == {id(fmt) for fmt in formats}
