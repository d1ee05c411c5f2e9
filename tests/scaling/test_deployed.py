# SPDX-License-Identifier: Apache-2.0
"""NVFP4 as libraries make it: codes and scales of their own code, run on a CPU, as recorded digests.

What was run, on ``numbers()``: Transformer Engine's NVFP4QuantizerRef (d0067d0, custom_recipes/reference_nvfp4.py),
NVFP4QuantizerPerTokenRef (e767493) and NVFP4Quantizer1x64Ref (92350db), fouroversix's ``quantize`` (dadfad6),
ModelOpt's NVFP4QTensor (a2fbac7), and compressed-tensors' generate_gparam, calculate_qparams and _quantize (ac8e2ba).
Signs of zeros are left out (some drop them), and so are codes of blocks whose scale is 0, all of which are worth 0. In
IF4 and IF6 errors were added from left to right, in the place of ``sum``, whose order is torch's.
"""

import copy
import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.formats.block import BlockFormat
from fmtsim.gemm.layers.config import Gemm, LinearConfig
from fmtsim.recipes.recipe import Recipe
from fmtsim.scaling.levels import fast_math_levels
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import FormatError

SOURCES = {
    "nvfp4_row": "df526d362cdfdb0b",
    "nvfp4_per_token": "c723dbb5bc7567c6",
    "nvfp4_1x64": "56efc924cf6f7f75",
    "nvfp4_modelopt": "c45c808c825b4084",
    "nvfp4_compressed_tensors": "fbd7f24344c66eff",
    "nvint4": "451b0db87dc48582",
    "nvfp4_four_six_mae": "c6601eb2b66e8443",
    "nvfp4_four_six_mae_256": "eff7198cbb73a551",
    "nvfp4_16x16_four_six_mae_256": "2c8d5759182ed7dd",
    "nvfp4_four_six_mse": "0fbc55dcfd3a4e22",
    "nvfp4_four_six_mse_256": "dc5994aa70992ed0",
    "nvfp4_16x16_four_six_mse_256": "afee2d1ee18eb632",
    "if4_mae": "10ad2b0ca051ccde",
    "if6_e3m2_mae": "30849edaa0fafec9",
    "if4_mse": "73627595d9e9ab27",
    "if6_e3m2_mse": "9dd52f7b6148f605",
}


def numbers() -> torch.Tensor:
    """Return [64, 256] of integers of a linear congruence under powers of two: ties of scales and elements abound."""
    state, words = 12345, []
    for _ in range(64 * 256):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        words.append(state >> 16)
    words = np.array(words).reshape(64, 256)
    x = (words % 97 - 48) * np.exp2((words >> 8).reshape(64, 16, 16)[:, :, :1] % 9 - 4.0).repeat(16, 2).reshape(64, 256)
    x[::7] += np.exp2(-11) * (words[::7] % 5)
    x[5] = 0
    return torch.tensor(x, dtype=torch.float32)


def digest(codes: torch.Tensor, scales: torch.Tensor, fmt: BlockFormat) -> str:
    """Return what is recorded of codes [64, 256] and scales, as bytes, of blocks of 16."""
    alive = (scales & 127 != 0).repeat_interleave(16, 1).repeat_interleave(fmt.block[0], 0)
    codes = torch.where(alive & (codes & (1 << fmt.bits - 1) - 1 != 0), codes, 0)
    return hashlib.sha256(codes.numpy().tobytes() + scales.contiguous().numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("name", SOURCES)
def test_codes_and_scales_of_the_source(name):
    fmt, x = fmtsim.get_format(name), numbers()
    made = fmtsim.encode(x, fmt)
    found = digest(made.unpacked(), made.scales, fmt)
    assert found == SOURCES[name]
    wrong = made.unpacked().clone()
    wrong[0, 1] ^= 1
    assert digest(wrong, made.scales, fmt) != found


def test_fast_math_scales_are_those_of_a_card():
    """Recorded on an H200: FlashInfer fb28d724, quantization_utils.cuh:497-507, compiled alone.

    Subnormal magnitudes are left out, which the card takes for zero.
    """
    rng, n = np.random.default_rng(3), 1 << 18
    tops = np.abs(rng.standard_normal(n).astype(np.float32)) * np.exp2(rng.integers(-12, 12, n)).astype(np.float32)
    part = 1 << 16
    tops[:part] = np.ldexp(1 + rng.random(part).astype(np.float32), rng.integers(-100, 100, part)).astype(np.float32)
    encode = np.float32(2688) / np.maximum(tops, np.float32(1e-30))
    amax = (tops * rng.random(n).astype(np.float32) ** 4).astype(np.float32)
    amax[::97] = 0
    amax[1::5] = tops[1::5]
    E4M3 = fmtsim.get_format("e4m3")
    a, encode = (torch.from_numpy(t[amax >= 2.0**-126]) for t in (amax, encode))
    store = lambda s: fmtsim.quantize(s, E4M3, overflow="saturate")  # noqa: E731
    stored, factor = fast_math_levels(a, torch.full_like(a, 6.0), encode, store)
    codes = fmtsim.encode(stored, E4M3).unpacked()
    assert hashlib.sha256(codes.numpy().tobytes() + factor.numpy().tobytes()).hexdigest()[:16] == "8198b86f92ec3d62"


def test_four_over_six_by_role():
    """Transformer Engine's scopes: the other operands and gradients stay plain NVFP4."""
    plain, tile, acts, weights = (fmtsim.get_format(name) for name in (
        "nvfp4", "nvfp4_16x16", "nvfp4_four_six_mae_256", "nvfp4_16x16_four_six_mae_256"))  # fmt: skip
    for name, x, w in (
        ("four_six", acts, weights),
        ("four_six_weights", plain, weights),
        ("four_six_acts", acts, tile),
    ):
        linear = fmtsim.get_recipe(name).linear
        assert (linear.fprop.a.format, linear.fprop.b.format, linear.dgrad.a.format) == (x, w, plain)
        assert linear.wgrad.b.format == x and linear.dgrad.b.source == "forward"


def test_blocks_of_integers_have_negative_scales(tmp_path):
    """Sixths and sevenths of the largest: each block takes the grid that has them, in files as well."""
    sixths, sevenths = torch.tensor([6.0, 4.0, 3.0, 1.5] * 4), torch.tensor([7.0, 5.0, -6.0, 1.0] * 4) * 6 / 7
    made = fmtsim.encode(torch.stack([torch.cat([sixths, sevenths])]), "if4")
    assert (made.scales > 127).tolist() == [[False, True]]
    assert made.unpacked()[0, 16:20].tolist() == [7, 5, 10, 1]  # two's complement
    made.save(tmp_path / "x.safetensors")
    assert torch.equal(fmtsim.Encoded.load(tmp_path / "x.safetensors").decode(), made.decode())
    torch.testing.assert_close(made.decode()[0, 16:], sevenths)
    for fields in ({"alternative": fmtsim.get_format("int8")}, {"scaling": fmtsim.get_format("nvfp4").scaling}):
        with pytest.raises(FormatError, match="choose as many bits, a signed scale, TensorScale"):
            replace(fmtsim.get_format("if4"), **fields)


def test_explanations_name_windows_candidates_and_integers():
    x = torch.cat(
        [torch.tensor([6.0, 4.0, 3.0, 1.5] * 4), torch.tensor([7.0, 5.0, -6.0, 1.0] * 4) * 6 / 7, torch.ones(48)]
    )
    for name, said in (("if4", "its sign: elements of int4"), ("nvfp4_four_six_mae", "1.5 times that by least error"),
                       ("nvfp4_1x64", "largest magnitude 1 / (448 * 6)")):  # fmt: skip
        explained = fmtsim.explain(x, name)
        assert said in str(explained) and explained.engine_agrees


def test_a_layer_multiplies_the_values_of_rows_and_windows():
    x, layer = numbers()[:32], torch.nn.Sequential(torch.nn.Linear(256, 16))
    for name in ("nvfp4_row", "nvfp4_1x64"):
        cast = Quantizer(format=name)
        linear = LinearConfig(fprop=Gemm(a=cast, b=cast), dgrad=Gemm(), wgrad=Gemm())
        model = fmtsim.convert(copy.deepcopy(layer), recipe=Recipe(name="rows", linear=linear, source="this test"))
        w = layer[0].weight.detach()
        values = fmtsim.quantize(x, name), fmtsim.quantize(w, name)
        torch.testing.assert_close(model(x), values[0] @ values[1].T + layer[0].bias, rtol=1e-6, atol=1e-4)  # sums
    with pytest.raises(FormatError, match="pass a block format such as 'nvfp4_row' instead"):
        Quantizer(format="e2m1", scaling=fmtsim.get_format("nvfp4_row").scaling)


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*SOURCES, "if6_e2m3_mse", "if6_e2m3_mae"])
def test_engines_follow_the_oracle(name, whole):
    """Short blocks and windows, subnormal and large tensors, rows of zeros, NaN and Inf."""
    fmt = fmtsim.get_format(name)
    # Rows of zeros, of numbers beside ties, and where the order in which a scale is multiplied decides.
    rows, columns = (slice(19), 72) if whole else (slice(2, 19), 24) if fmt.block[0] == 16 else ([0, 5, 6, 9, 18], 72)
    x = numbers()[rows, :columns].clone()
    for size, specials in ((1.0, ()), (2.0**-140, ()), (2.0**110, ()), (0.7, (float("inf"), float("nan")))):
        y = x * size
        for i, special in enumerate(specials):
            y[i, 20 * i] = special
        expected, made = quantize_matrix(y.tolist(), fmt), fmtsim.encode(y, fmt, pad=True)
        parts = made.parts()
        assert parts.codes.tolist() == expected.codes
        pairs = ((parts.scales, expected.scales), (parts.tensor_scale, expected.tensor_scale),
                 (made.decode(), expected.values), (fmtsim.quantize(y, fmt, pad=True), expected.values))  # fmt: skip
        if fmt.alternative is not None:
            signs = torch.tensor([[s < 0 or math.copysign(1, s) < 0 for s in row] for row in expected.scales])
            assert torch.equal(parts.scales.signbit() | parts.scales.isnan(), signs | parts.scales.isnan())
        for got, wanted in pairs:
            torch.testing.assert_close(got, torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)
