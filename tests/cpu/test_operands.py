# SPDX-License-Identifier: Apache-2.0
"""Kernels for operands of layers against the torch operations that define them, bit by bit."""

import dataclasses

import pytest
import torch

import fmtsim
from fmtsim import torch_engine
from fmtsim.cpu.cast import blockwise, hadamard_kernels
from fmtsim.cpu.runtime import pool
from fmtsim.formats.block import BlockFormat
from fmtsim.gemm.layers import multiply
from fmtsim.gemm.layers import quantize_operand as operands
from fmtsim.recipes import get_recipe, list_recipes
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling import blocks, scaled_cast
from fmtsim.scaling.hadamard import transform
from fmtsim.scaling.hadamard_matrix import base_matrix
from fmtsim.scaling.scales import Scales
from fmtsim.spec.cast import CastSpec, RandomKey
from tests.support.bits import assert_same_bits

SHAPES = ((64, 96), (37, 130), (1, 7), (130, 5))
BLOCKS = ((1, 16), (1, 32), (32, 1), (16, 16), (3, 7), (None, None), (1, None), (None, 1))


def specials(*shape: int) -> torch.Tensor:
    """Return normal numbers with rows of zeros, NaN, infinities, -0 and the ends of float32."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    flat = x.view(-1)
    for start, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, -3.4e38, 1e-38)):
        flat[3 + start :: 41 + start] = value
    x[len(x) // 2] = 0
    return x


def laid_out(x: torch.Tensor) -> list[torch.Tensor]:
    """Return a matrix in three layouts."""
    return [x, x.mT.contiguous().mT, torch.cat([x, x], 1)[:, : x.shape[1]]]


@pytest.fixture(params=[1, 3])
def threads(request, monkeypatch):
    """Cut all work, however small, for some threads."""
    monkeypatch.setattr(pool, "_GRAIN", 64)
    monkeypatch.setattr(pool, "_threads", request.param)


@pytest.fixture
def torch_operations(monkeypatch):
    """Return what runs a function with kernels for plain casts alone."""

    def run(function, *given, **named):
        with monkeypatch.context() as patch:
            for of in (scaled_cast.ops, blocks, operands, multiply):
                patch.setattr(of, "cpu_engine", lambda x: None)
            patch.setattr("fmtsim.scaling.hadamard.is_dense", lambda x: False)
            return function(*given, **named)

    return run


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics(shape, block, threads, torch_operations):
    for x in laid_out(specials(*shape)):
        for kind in ("amax", "std", "rms", "mean_abs"):
            wanted = torch_operations(blocks.statistic, x, block, kind)
            assert_same_bits(blocks.statistic(x, block, kind), wanted)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_elements_times_the_numbers_of_blocks(shape, block, threads, torch_operations):
    sizes = blocks.block_sizes(block, torch.Size(shape))
    counts = [-(-extent // size) for extent, size in zip(shape, sizes, strict=True)]
    s = torch.rand(counts, generator=torch.Generator().manual_seed(1)) + 0.1
    eight = [specials(*shape).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
    for x in (y for each in (specials(*shape), *eight) for y in laid_out(each)):
        ways = [{}, {"tensor_scale": torch.tensor(0.3)}] + [{"divides": True}] * (x.dtype == torch.float32)
        for how in ways:
            found = scaled_cast.times_blocks(x, s, sizes, **how)
            assert_same_bits(
                found.nan_to_num(7), torch_operations(scaled_cast.times_blocks, x, s, sizes, **how).nan_to_num(7)
            )
            assert torch.equal(found.isnan(), x.float().isnan())


@pytest.mark.parametrize("mode", ["nearest_even", "stochastic", "nearest_away", "up"])
@pytest.mark.parametrize("shape", SHAPES)
def test_casts_of_scaled_elements(shape, mode, threads, torch_operations):
    sizes, rounding = (1, 16), Rounding(mode=mode)
    factor = torch.rand(shape[0], -(-shape[1] // 16), generator=torch.Generator().manual_seed(1)) * 3
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("e2m1", torch.float32)):
        spec = CastSpec(format=fmtsim.get_format(name), rounding=rounding, overflow="saturate")
        for x in laid_out(specials(*shape)):
            for divides in (False, True):
                given = Scales(factor, factor, divides), sizes, spec, RandomKey(5, 9), dtype
                found = scaled_cast._rounded(x, *given, True)
                wanted = torch_operations(scaled_cast._rounded, x, *given, True)
                assert_same_bits(found.elements.float().nan_to_num(7), wanted.elements.float().nan_to_num(7))
                assert_same_bits(found.scaled, wanted.scaled)
                assert found.elements.dtype == dtype and not scaled_cast._rounded(x, *given, False).scaled.numel()


def test_nan_that_a_format_refuses():
    strict = dataclasses.replace(fmtsim.get_format("e2m1"), name="strict", nan_policy="error")
    x = torch.tensor([[1.0, torch.nan]])
    with pytest.raises(fmtsim.errors.ArgumentError, match="x holds NaN, which strict lacks and its record forbids"):
        scaled_cast.cast(x, strict, fmtsim.Scaling(), Rounding(), "saturate")


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 512])
def test_rotations(size, inverse, threads):
    flips = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    for rows in (size, 3 * size):
        for x in (
            each for t in (specials(rows, 2 * size), specials(rows, 2 * size).bfloat16()) for each in laid_out(t)
        ):
            for dim in (-1, -2):
                wanted = transform(x, size, dim, base_matrix(1), flips, inverse)
                found = hadamard_kernels.hadamard(x, size, dim, flips, inverse)
                assert_same_bits(found, wanted)
                assert found.is_contiguous()
    assert hadamard_kernels.hadamard(specials(24, 24), 12, -1, None, False) is None


@pytest.mark.parametrize("mode", ["nearest_even", "stochastic"])
@pytest.mark.parametrize("name", [n for n in fmtsim.list_formats() if isinstance(fmtsim.get_format(n), BlockFormat)])
def test_blocks_down_columns(name, mode, threads):
    spec = CastSpec(format=fmtsim.get_format(name), rounding=Rounding(mode=mode), overflow="saturate", dim=-2)
    key = RandomKey(3, 1) if mode == "stochastic" else None
    for shape in ((256, 130), (70, 5)):
        for x in (torch.randn(shape, generator=torch.Generator().manual_seed(2)), specials(*shape)):
            found, wanted = torch.empty_like(x), torch.empty_like(x)
            fmtsim.cpu.quantize(x, spec, key, found)
            torch_engine.quantize(x, spec, key, wanted)
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("dtype", blockwise.FLOAT8)
def test_every_code_of_float8(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for x in (codes, codes.mT):
        found = operands.widened(x, torch.float32)
        assert_same_bits(found.nan_to_num(7, posinf=8), x.float().nan_to_num(7, posinf=8))
        assert torch.equal(found.isnan(), x.float().isnan()) and found.stride() == x.stride()


def test_what_follows_a_product(threads, torch_operations):
    columns, rows, bias = torch.rand(96, 1) + 0.1, torch.rand(64, 1) + 0.1, torch.randn(96)
    one = torch.full((1, 1), 0.7)
    for given in (
        (columns, rows, bias),
        (None, rows, None),
        (one, None, bias),
        (columns, one, None),
        (None, None, bias),
    ):
        y = specials(64, 96)
        wanted = torch_operations(multiply.finish_sums, y.clone(), *given[:2], None, given[2], torch.float32, False)
        assert_same_bits(multiply.finish_sums(y, *given[:2], None, given[2], torch.float32, False), wanted)


@pytest.mark.parametrize(
    "name", [name for name in list_recipes(kind="training") if get_recipe(name).linear is not None]
)
def test_layers_of_recipes(name, torch_operations):
    config = get_recipe(name).linear
    if "history=History" in repr(config):
        pytest.skip("needs a state")
    generator = torch.Generator().manual_seed(4)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((256, 128), (384, 128), (256, 384)))

    def step():
        leaves = [t.clone().requires_grad_() for t in (x, w, torch.ones(384))]
        y = fmtsim.EmulatedGEMM.apply(*leaves, config, 7)
        y.backward(g)
        return [y.detach(), *(leaf.grad for leaf in leaves)]

    for found, wanted in zip(step(), torch_operations(step), strict=True):
        assert_same_bits(found, wanted)
