# SPDX-License-Identifier: Apache-2.0
"""Caches of vLLM by name: bytes that its kernels wrote, slow oracles, scales a head, NVFP4 under a fixed scale."""

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.casts.quantize import encode
from fmtsim.ptq import QuantisedCache
from fmtsim.ptq.cache import CACHES, lloyd_max
from fmtsim.support.errors import ArgumentError
from tests.ptq.cache_oracle import oracle
from tests.support.bits import assert_same_bits, same_bits
from tests.support.operands import normal

# Keys and values of two tokens [tokens, d], and what vLLM 0.33.0's kernels wrote for them on a CPU (Triton 3.9.0,
# TRITON_INTERPRET=1): triton_turboquant_store with its own centroids, _reshape_cache_per_token_head with IS_INT_QUANT.
KEYS = torch.tensor(
    [[((i * i * 7919 + 131 * i + t * 577) % 1009 - 504) / 97 * (i + 2) ** 0.5 for i in range(16)] for t in (0, 1)]
)
VALUES = torch.tensor([[((i * i * 6007 + 37 * i + t * 311) % 1013 - 404) / 53 for i in range(16)] for t in range(2)])
SLOTS = {  # key codes, norm, value codes, step, least value
    "turboquant_4bit_nc": "447b871b7926a8c49351f07c70dbade6a5cced3c9fc7 cb585be8948a1467294f45c2c520f24afa11df3c91c7",
    "turboquant_k3v4_nc": "4a371adcc0ca9351f07c70dbade6a5cced3c9fc7 3555f162296c294f45c2c520f24afa11df3c91c7",
    "turboquant_3bit_nc": "4a371adcc0ca9351b887d5eebeda47419fc7 3555f162296c294f52ac2279d527384191c7",
}
INT8 = [
    [-53, 62, 23, -79, -75, 71, -38, -5, -39, 96, -95, -113, 62, -127, -120, 102],
    [10, 8, -52, 20, 38, -17, 105, -127, 121, -13, 68, 52, -72, 49, 64, -38],
]
INT8_SCALES = ["0x1.1c9782p-3", "0x1.c3dc2cp-4"]
CENTROIDS = {  # the upper half of heads of 128
    3: "0x1.62c62ep-6 0x1.1192aap-4 0x1.e6487ap-4 0x1.85413ep-3",
    4: "0x1.73f75cp-7 0x1.190ab2p-5 0x1.dba1c2p-5 0x1.5533e4p-4 0x1.c6d056p-4 0x1.24de2ep-3 0x1.766dcep-3 "
       "0x1.ee5988p-3",
}  # fmt: skip


def packed(codes, bits):
    """Return codes of a token as vLLM packs them: little endian, the first code in the lowest bits."""
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes.tolist()))
    return number.to_bytes(len(codes) * bits // 8, "little")


def half(x):
    return np.float16(x).tobytes()


@pytest.mark.parametrize("name", SLOTS)
def test_turboquant_keeps_the_bytes_of_vllm(name):
    cache = QuantisedCache(name)
    cache.append(KEYS[None], VALUES[None])
    (codes, norm), (steps, s, low) = (chunks[0] for chunks in cache._chunks)
    for token, slot in enumerate(SLOTS[name].split()):
        numbers = [half(part.decode()[0, token, 0]) for part in (norm, s, low)]
        key, value = (packed(part.unpacked()[0, token], part.format.bits) for part in (codes, steps))
        assert (key + numbers[0] + value + b"".join(numbers[1:])).hex() == slot


def test_int8_has_the_codes_of_vllm():
    cache = QuantisedCache("int8_per_token_head")
    cache.append(KEYS[None], VALUES[None])
    part = cache._chunks[0][0][0]
    assert part.unpacked()[0].to(torch.int8).tolist() == INT8
    assert part.scales.flatten().tolist() == list(map(float.fromhex, INT8_SCALES))


@pytest.mark.parametrize("bits", [3, 4])
def test_centroids_are_those_of_vllm(bits):
    book = lloyd_max(128, bits)
    assert list(book.values[2 ** (bits - 1) :]) == [float.fromhex(c) for c in CENTROIDS[bits].split()]
    c = np.float32(book.values)
    middles = (c[:-1] + c[1:]) / np.float32(2)
    for code, middle in enumerate(middles):  # a number in the middle goes up, its neighbour below does not
        x = torch.tensor([middle, np.nextafter(middle, np.float32(-1))])
        assert encode(x, book).unpacked().tolist() == [code + 1, code]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_named_caches_equal_their_oracles(name, dtype):
    k, v = normal(2, 3, 5, 64, seed=1, dtype=dtype), normal(2, 3, 5, 32, seed=2, dtype=dtype) * 3
    k[0, 0, 0], v[0, 0, 0], v[0, 0, 1] = 0, 0, 1.5
    k[1, 0], v[1, 0] = k[1, 0] * 1e-5, v[1, 0] * 2e-8  # below the least scales
    v[1, 1] *= 1e-5
    for i, t in enumerate(QuantisedCache(name).rounded(k, v)):
        assert_same_bits(t, oracle(name, i, (k, v)[i]))
    whole, steps = QuantisedCache(name), QuantisedCache(name)
    whole.append(k, v)
    for i in range(5):
        steps.append(k[..., i : i + 1, :], v[..., i : i + 1, :])
    assert same_bits(whole.keys(), steps.keys()) and same_bits(whole.values(), steps.values())
    assert whole.nbytes == steps.nbytes


def test_bytes_of_named_caches_are_the_slots_of_vllm():
    x, slots = normal(1, 2, 3, 128), {"turboquant_k8v4": 196, "turboquant_4bit_nc": 134, "turboquant_k3v4_nc": 118}
    for name, size in (slots | {"turboquant_3bit_nc": 102, "int8_per_token_head": 2 * 132}).items():
        cache = QuantisedCache(name)
        cache.append(x, x)
        assert cache.nbytes == 6 * size


def test_named_caches_lose_what_their_bits_say():
    x = normal(4, 2, 16, 64, seed=3)
    errors = [float((QuantisedCache(name).rounded(x, x)[0] - x).norm() / x.norm()) for name in list(CACHES)[::-1]]
    three, also_three, four, eight, int8, fp8 = errors
    assert three == also_three > 2 * four * 0.85 > four > eight > int8 and fp8 > int8


@pytest.mark.parametrize("fmt", ["e4m3", "int8", "nvfp4"])
def test_a_static_scale_a_head(fmt):
    x, scales = normal(2, 3, 5, 32, seed=4), [0.5, 0.01, 2.0]
    whole = QuantisedCache(fmt, key_scale=scales, value_scale=torch.tensor(scales)).rounded(x, x)
    assert same_bits(*whole)
    for head, scale in enumerate(scales):
        alone = QuantisedCache(fmt, key_scale=scale).rounded(x[:, head], x[:, head])[0]
        assert_same_bits(whole[0][:, head], alone)
        if fmt != "nvfp4":
            assert_same_bits(alone, fmtsim.quantize(x[:, head] / scale, fmt, overflow="saturate") * scale)


@pytest.mark.parametrize("scale", [1.0, 0.3, 7e-4])
def test_nvfp4_keeps_its_tensor_scale(scale):
    # blocks whose scale, and elements, lie next to the ties of E4M3 and E2M1; those of a wide range, and zeros
    codes = torch.arange(1, 126).to(torch.uint8)
    low, high = (c.view(torch.float8_e4m3fn).float() for c in (codes, codes + 1))
    top = ((low + high) * 3 * scale).numpy()
    near = [top * np.float32(1 + n * 2**-23) for n in range(-4, 5)]
    shares = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]).repeat(2) / 6
    ties = torch.from_numpy(np.concatenate(near))[:, None] * (shares * (1 - torch.arange(16) * 2**-23))
    wide = normal(50, 16, seed=5) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 0.0])[:, None].repeat(10, 1)
    x = torch.cat([ties, -ties.flip(1), wide])[None]
    one, g, blocks = np.float32(1), np.float32(1) / np.float32(scale), x.numpy().reshape(-1, 16)
    wanted = g * (np.abs(blocks).max(1, keepdims=True) * np.float32(1 / 6))
    b = torch.from_numpy(wanted).clamp(max=448).to(torch.float8_e4m3fn).float().numpy()  # later tokens saturate
    factor = np.where(b == 0, 0, one / np.where(b == 0, one, b * (one / g)))
    grid, y = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6]), blocks * factor
    distance = np.abs(np.abs(y.astype(float)).clip(max=6)[..., None] - grid)
    codes = (distance + np.arange(8) % 2 * 1e-12).argmin(-1)  # ties to even codes
    expected = np.copysign(grid[codes], y) * b * np.float32(scale)
    k, _ = QuantisedCache("nvfp4", key_scale=scale).rounded(x, x)
    assert_same_bits(k, torch.from_numpy(expected.reshape(x.shape)))


@pytest.mark.parametrize("fmt", ["nvfp4_row", "nvfp4_per_token", "nvfp4_1x64"])
def test_second_levels_of_a_token_need_no_static_scale(fmt):
    x = normal(2, 3, 5, 128, seed=6) * torch.tensor([1e-6, 1.0, 1e6, 3.0, 0.0])[:, None]
    whole = QuantisedCache(fmt).rounded(x, x)[0]
    for token in range(5):
        assert_same_bits(whole[:, :, token], fmtsim.quantize(x[:, :, token].reshape(6, 128), fmt).reshape(2, 3, 128))


@pytest.mark.parametrize(
    ("message", "fmt", "scale", "shape"),
    [
        (r"4 scales for 2 heads of keys; pass one, or one a head of them", "e4m3", [1.0] * 4, (1, 2, 3, 16)),
        (r"nvfp4 has blocks of 16, which do not divide the 24 features of a head", "nvfp4", 1.0, (1, 2, 3, 24)),
        (r"TurboQuant rotates heads of 8, 16, 32 and so on features, and these have 80; choose",
         "turboquant_3bit_nc", 1.0, (1, 2, 3, 80)),
        (r"nvfp4_modelopt makes block scales by a rule that needs the whole tensor; choose 'nvfp4' or 'nvfp4_row'",
         "nvfp4_modelopt", 1.0, (1, 2, 3, 16)),
        (r"a scale of 2.0 for nvfp4_row; .* none beside scales", "nvfp4_row", 2.0, None),
        (r"a scale of \[1.0, 0.0\] for e4m3; pass a number above 0", "e4m3", [1.0, 0.0], None),
        (r"a scale of 2.0 for steps of 4 bits; .* none beside scales", "turboquant_k8v4", 2.0, None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(message, fmt, scale, shape):
    with pytest.raises(ArgumentError, match=message):
        cache = QuantisedCache(fmt, key_scale=scale if shape else 1.0, value_scale=1.0 if shape else scale)
        x = torch.ones(shape)
        cache.append(x, x)
