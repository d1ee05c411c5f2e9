# SPDX-License-Identifier: Apache-2.0
"""``like=``: the language of profiles against exact fractions, every profile as data, and packages that tests have."""

import json
import math
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy
import pytest
import torch

import fmtsim
from fmtsim.casts.profile import get_profile, library_profiles
from fmtsim.casts.profile_steps import DTYPES, fma, run
from fmtsim.formats.interop import torch_dtype
from fmtsim.lab.verify.outcome import boundaries
from fmtsim.rounding.oracle import round_value
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError
from tools.peers.card import digest, lists

PROFILES = [profile for library in {name.partition("/")[0] for name in fmtsim.list_profiles()}
            for profile in library_profiles(library)]  # fmt: skip
X = torch.tensor([0.1, -450.0, 500.0, 0.0, -0.0, 1e-5, 3.0, math.nan])


def bits(x):
    """Return a tensor's bits, NaN as one."""
    x = torch.where(x.isnan(), math.nan, x.double())
    return x.view(torch.int64)


# The language.


def test_fma_rounds_the_exact_sum_once():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2000, generator=generator) for _ in range(2))
    products = (a.double() * b.double()).float()
    tiny = torch.exp2(torch.randint(-60, 1, (2000,), generator=generator).float())
    for c in (-products, -products * (1 + 2**-20), tiny, -products + tiny * 2**-20):
        exact = [
            Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(*(t.tolist() for t in (a, b, c)), strict=True)
        ]
        expected = [round_value(x, fmtsim.get_format("fp32"), "nearest_even", "ieee") for x in exact]
        assert fma(a, b, c).tolist() == expected


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("value = exponent(x)", [1, 2, -150 + 1, -1000, 1000]),
        ("value = pow2(exponent(x) - 1)", [1.0, 2.0, 0.0, 0.0, math.inf]),
        ("value = from_bits(bits(x) ^ (1 << 31), 'fp32')", [-3.0, -4.5, -(2.0**-149), -0.0, -math.inf]),
        ("value = rint(x) - floor(x)", [0.0, 0.0, 0.0, 0.0, math.nan]),
        ("value = round_away(x)", [3.0, 5.0, 0.0, 0.0, math.inf]),
        ("value = where((x > 4) & ~isinf(x), 1.0, 2)", [2.0, 1.0, 2.0, 2.0, 2.0]),
        ("value = clamp(x, -1, top) // 2", [1.0, 2.0, 0.0, 0.0, 224.0]),
        ("value = fp16(x) + 0.1", None),
    ],
)
def test_a_step_does_what_its_name_says(steps, expected):
    x = torch.tensor([3.0, 4.5, 1e-45, 0.0, math.inf]).reshape(-1, 1)
    value = run(steps, x, 1, fmtsim.get_format("e4m3"), {})["value"]
    if expected is None:  # the constant is rounded to float16, then the sum
        expected = (x.half() + torch.tensor(0.1, dtype=torch.float16)).flatten().tolist()
    assert bits(value.flatten()).tolist() == bits(torch.tensor(expected, dtype=torch.float64)).tolist()


def test_float64_rounds_once_to_bfloat16():
    x = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    assert run("value = bf16(x)", x, 1, None, {})["value"].item() == 1 + 2**-7
    assert run("value = bf16(fp32(x))", x, 1, None, {})["value"].item() == 1.0


def test_reductions_are_of_a_block_a_row_or_the_tensor():
    x = torch.arange(24.0).reshape(6, 4)  # three rows of two blocks
    names = run("value = x\na = amax(x)\nb = amax(x, 'row')\nc = amin(x, 'tensor')", x, 2, None, {})
    assert names["a"].flatten().tolist() == [3, 7, 11, 15, 19, 23]
    assert names["b"].flatten().tolist() == [7, 7, 15, 15, 23, 23]
    assert names["c"].flatten().tolist() == [0] * 6


def test_tables_and_buckets():
    x = torch.tensor([[-1.0], [0.5], [2.0]])
    names = run("value = lookup(values, bucket(x, turns))\nlow = bucket(x, turns, right=False)", x, 1, None,
                {"values": [10.0, 20.0, 30.0], "turns": [0.5, 1.5]})  # fmt: skip
    assert names["value"].flatten().tolist() == [10.0, 20.0, 30.0]
    assert names["low"].flatten().tolist() == [0, 0, 2]


@pytest.mark.parametrize("steps", ["value = __import__('os')", "value = x.shape", "import os", "value = y", "x += 1"])
def test_what_is_no_step_is_refused(steps):
    with pytest.raises(FormatError, match="no meaning|not an assignment"):
        run(steps, X.reshape(-1, 1), 1, None, {})


# The records.


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: f"{profile.like} {profile.formats[0]}")
def test_a_profile_says_where_it_is_from_and_runs(profile):
    assert profile.function and profile.source and profile.versions and profile.verified and profile.package
    assert set(profile.inputs) <= set(DTYPES)
    for name in profile.formats:
        fmt = fmtsim.get_format(name)
        block = profile.block_of(fmt)
        size = block if isinstance(block, int) else 8
        for dtype in profile.inputs:
            x = torch.linspace(-2, 2, 2 * size * 4).reshape(-1, 2 * size).to(DTYPES[dtype])
            results = profile.results(x, fmt)
            assert results["value"].shape == x.shape and results["value"].is_floating_point()
            assert "code" not in results or results["code"].shape == x.shape


def test_a_format_has_one_profile_of_a_name():
    seen = [(profile.like, name, profile.inputs) for profile in PROFILES for name in profile.formats]
    assert len(seen) == len(set(seen))


# Packages that tests have: all 16-bit inputs, and both neighbours of every boundary.


def inputs(fmt):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    yield every.view(torch.float16)
    yield every.view(torch.bfloat16)
    yield boundaries(fmt, torch.float32)
    yield boundaries(fmt, torch.float64)


@pytest.mark.parametrize("name", [name for one in PROFILES if one.like == "ml_dtypes" for name in one.formats])
def test_ml_dtypes(name):
    fmt = fmtsim.get_format(name)
    dtype = numpy.dtype({"e4m3": "float8_e4m3fn", "e8m0": "float8_e8m0fnu", "bf16": "bfloat16", "e2m1": "float4_e2m1fn",
                         "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e4m3_ieee": "float8_e4m3"}
                        .get(name, f"float8_{name}"))  # fmt: skip
    for x in inputs(fmt):
        profile, _ = get_profile("ml_dtypes", name, x.dtype)
        assert ml_dtypes.__version__ in profile.versions
        if x.dtype in (DTYPES[one] for one in profile.inputs):
            with numpy.errstate(all="ignore"):
                theirs = (x.float() if x.dtype == torch.bfloat16 else x).numpy().astype(dtype)
            codes = torch.from_numpy(theirs.view(f"u{dtype.itemsize}").astype("int64"))
            assert torch.equal(profile.results(x, fmt)["code"].to(torch.int64), codes)


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_torch(name):
    profile, fmt = get_profile("torch", name)
    if not torch.__version__.startswith(profile.versions.split()[-1]):
        pytest.skip(f"torch {torch.__version__} is installed, the profile is of {profile.versions}")
    for x in inputs(fmt):
        theirs = x.to(torch_dtype(fmt))
        assert torch.equal(bits(fmtsim.quantize(x, name, like="torch", out_dtype=torch.float64)), bits(theirs.double()))
        assert torch.equal(fmtsim.encode(x, name, like="torch").unpacked(), theirs.view(torch.uint8))


CARD = json.loads((Path(__file__).parent / "data" / "h200_casts.json").read_text())
WAYS = {"eager": "torch/cuda", "compile": "torch/compile_cuda", "triton": "triton"}


@pytest.mark.parametrize("way", WAYS)
def test_a_cards_casts(way):
    """Digests that ``python -m tools.peers.card`` wrote on an H200."""
    every = {name: x for name, x in lists() if name.startswith(("all", "fp32_800", "fp64_above"))}
    compared = 0
    for key, recorded in CARD.items():
        if not key.startswith(way) or key.split("|")[2] not in every or recorded.startswith("error"):
            continue
        _, target, name = key.split("|")
        x, fmt = every[name], fmtsim.get_format(getattr(torch, target))
        like = WAYS[way] if target in ("float8_e4m3fn", "float8_e5m2") else "torch/cuda"
        profile, _ = get_profile(like, fmt, x.dtype)
        codes = profile.results(x, fmt)["code"]
        assert digest(codes.to(torch.uint8 if fmt.bits == 8 else torch.int16)) == recorded, key
        compared += x.numel()
    assert compared > 2_000_000


def test_e8m0_is_not_ml_dtypes_cast_unless_asked():
    x = torch.tensor([3.0, 0.0, -1.0])
    assert fmtsim.quantize(x, "float8_e8m0fnu").tolist()[0] == 2.0
    theirs = fmtsim.quantize(x, "float8_e8m0fnu", like="ml_dtypes")
    assert theirs[0] == 4.0 and theirs[1:].isnan().all()


# The verbs.


def test_verbs_take_what_quantize_takes():
    expected = fmtsim.quantize(X, "e4m3", overflow="ieee")
    assert torch.equal(bits(fmtsim.quantize(X, "e4m3", like="jax")), bits(expected))
    assert torch.equal(bits(fmtsim.quantize(X.double(), torch.float8_e4m3fn, like="jax")), bits(expected))
    array = fmtsim.quantize(X.numpy(), "e4m3", like="jax")
    assert torch.equal(bits(torch.from_numpy(array)), bits(expected))
    out = torch.empty(8)
    assert fmtsim.quantize(X, "e4m3", like="jax", out=out) is out and torch.equal(bits(out), bits(expected))
    assert torch.equal(fmtsim.encode(X, "e4m3", like="jax").decode().nan_to_num(), expected.nan_to_num())
    rows = fmtsim.quantize(X.expand(2, 8).t(), "int8_channel", like="torchao", dim=0).t()
    assert torch.equal(bits(rows[0]), bits(fmtsim.quantize(X[None], "int8_channel", like="torchao")[0]))


def test_gradient_passes_through_and_graphs_have_the_bits():
    x = X[:-1].clone().requires_grad_()
    y = fmtsim.quantize(x, "e4m3", like="torch")
    y.sum().backward()
    assert x.grad.tolist() == [1.0] * 7
    compiled = torch.compile(lambda x: fmtsim.quantize(x, "e4m3", like="torch"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), y)
    assert torch.equal(torch.func.vmap(lambda x: fmtsim.quantize(x, "e4m3", like="torch"))(x.detach()[None]), y[None])


def test_a_quantizer_is_like_a_library():
    layer = torch.nn.Linear(32, 8)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for format in ("e4m3", "mxfp4"):
        like = fmtsim.Quantizer(format=format, like="torchao" if format == "mxfp4" else "torch")
        plain = fmtsim.Gemm(a=fmtsim.Quantizer(), b=fmtsim.Quantizer())
        config = fmtsim.LinearConfig(fprop=fmtsim.Gemm(a=like, b=like), dgrad=plain, wgrad=plain)
        model = fmtsim.convert(torch.nn.Sequential(torch.nn.Linear(32, 8)), config)
        model[0].load_state_dict(layer.state_dict())
        operands = (fmtsim.quantize(t, format, like=like.like) for t in (x, layer.weight))
        assert torch.equal(model(x), torch.nn.functional.linear(*operands, layer.bias))


def test_blocks_are_those_of_the_format():
    """int4_g64 has blocks of 64, although the steps stand beside those of int4_g32."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    for profile in PROFILES:
        for name in profile.formats:
            block = getattr(fmtsim.get_format(name), "block", (1, None))[1]
            if isinstance(profile.block, int) and block is not None and "fp32" in profile.inputs:
                alone = fmtsim.quantize(x, name, like=profile.like)
                assert torch.equal(alone, fmtsim.quantize(x, name, like=profile.like, block_size=block)), name
                if '"tensor"' not in profile.steps and not profile.like.startswith("fouroversix"):
                    pieces = [fmtsim.quantize(piece, name, like=profile.like) for piece in x.split(block, 1)]
                    assert torch.equal(alone, torch.cat(pieces, 1)), (profile.like, name)


def test_errors_name_the_variant_that_has_the_format():
    with pytest.raises(FormatError, match=r"choose like='onnxruntime/quantize_linear'"):
        fmtsim.quantize(X, "int4_full", like="onnxruntime")


def test_bad_requests_say_what_there_is():
    with pytest.raises(FormatError, match=r"like='tornado' has no profile.*list_profiles"):
        fmtsim.quantize(X, "e4m3", like="tornado")
    with pytest.raises(FormatError, match=r"like='torch/cpu' has no profile; torch has 'torch'"):
        fmtsim.quantize(X, "e4m3", like="torch/cpu")
    with pytest.raises(FormatError, match=r"'numpy' has no cast to e4m3; it has fp16"):
        fmtsim.quantize(X, "e4m3", like="numpy")
    with pytest.raises(ArgumentError, match=r"rounding='up' with like='torch', which says how; leave rounding= out"):
        fmtsim.quantize(X, "e4m3", "up", like="torch")
    with pytest.raises(ArgumentError, match=r"block_size=32 does not divide 8 \(dim=-1\); torchao takes whole blocks"):
        fmtsim.quantize(X, "mxfp4", like="torchao")
    with pytest.raises(ArgumentError, match=r"block_size=8: torch has no size to choose; leave it out"):
        fmtsim.quantize(X, "e4m3", like="torch", block_size=8)
    with pytest.raises(DtypeError, match=r"x has dtype torch.float64; torchao takes fp32, bf16"):
        fmtsim.quantize(X.double().repeat(4), "mxfp4", like="torchao")
    with pytest.raises(FormatError, match=r"Quantizer like='torch' says how to round and scale"):
        fmtsim.Quantizer(format="e4m3", like="torch", overflow="ieee")
    mxfp4 = fmtsim.Quantizer(format="mxfp4", like="torchao")
    with pytest.raises(
        ArgumentError, match=r"Gemm target='h200': values of mxfp4 like torchao have scales of their own"
    ):
        fmtsim.Gemm(a=mxfp4, b=mxfp4, target="h200")


def test_explain_shows_the_steps():
    explained = fmtsim.explain([957.0, 0.1], "e4m3", like="jax")
    assert explained.values[1] == 0.1015625 and math.isnan(explained.values[0]) and explained.ours == (448.0, 0.1015625)
    assert "value = " in str(explained) and explained.source in str(explained)
    blocks = fmtsim.explain([1.0] * 32, "mxfp4", like="torchao")  # which takes no float64
    assert blocks.steps[0].text.startswith("x = fp32(x)") and set(blocks.values) == {1.0}
