# SPDX-License-Identifier: Apache-2.0
"""The Hadamard transform against steps of exact sums, itself backwards, and the tensor cores that it stands for."""

import math

import numpy
import pytest
import torch
from torch.func import jvp, vmap

import fmtsim
from fmtsim.scaling.hadamard import _parts, hadamard, root
from fmtsim.scaling.hadamard_matrix import base_matrix, base_of, hadamard_matrix, mask_bits, random_signs, sign_bits
from fmtsim.support.errors import ArgumentError, DtypeError
from tests.support.bits import assert_same_bits, same_bits
from tests.support.operands import normal, wide

NAN, F32 = math.nan, numpy.float32
TE_SIGNS = 0xD7E8  # Transformer Engine's sixteen signs
BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")


# The oracle: sums and products of binary32, one at a time.


def fours(terms):
    total = F32(0)
    for k in range(0, len(terms), 4):
        a, b, c, d = terms[k : k + 4]
        total = total + ((a + b) + (c + d))
    return total


def oracle(group, mask=0, inverse=False, base=None):
    size = len(group)
    b = base_of(size) if base is None else len(base)
    base = (hadamard_matrix(b) if base is None else base).tolist()
    length = size // b
    y = [F32(-v if mask >> i & 1 and not inverse else v) for i, v in enumerate(group)]
    distances = [2**k for k in range(length.bit_length() - 1)]
    for h in distances:
        for i in range(size):
            if not i % length & h:
                y[i], y[i + h] = y[i] + y[i + h], y[i] - y[i + h]
    if b > 1:
        weight = (lambda u, v: base[v][u]) if inverse else (lambda u, v: base[u][v])
        y = [fours([F32(weight(u, v)) * y[u * length + w] for u in range(b)]) for v in range(b) for w in range(length)]
    y = [v * F32(1 / math.sqrt(size)) for v in y]
    return [-v if mask >> i & 1 and inverse else v for i, v in enumerate(y)]


def exact(group, **how) -> torch.Tensor:
    with numpy.errstate(all="ignore"):
        y = torch.tensor(oracle(group, **how), dtype=torch.float32)
    return torch.where(y.isnan(), NAN, y)


@pytest.mark.parametrize(
    ("of", "limit", "first"),
    [
        ((5, 16, 40), 512, (1, 16, 32)), ((5, 16, 8), 512, (4, 16, 8)), ((3, 4, 1), 8, (2, 4, 1)),
        ((2, 64, 20), 64, (1, 64, 16)), ((2, 16, 100), 1200, (1, 16, 64)),
    ],
)  # fmt: skip
def test_parts_cover_whole_groups_once(of, limit, first):
    covered, parts = torch.zeros(of), list(_parts(*of, limit))
    for part in parts:
        covered[part] += 1
    assert bool((covered == 1).all()) and covered[parts[0]].shape == first


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16, 20, 24, 32, 36, 48, 64, 80, 92, 112, 128, 156, 172])
@pytest.mark.parametrize("inverse", [False, True])
def test_every_bit_of_every_step(size, inverse):
    x, mask = wide(2, size, seed=size), random_signs(size, 1)
    y = hadamard(x, size, mask, inverse=inverse)
    for row, found in zip(x.tolist(), y, strict=True):
        assert_same_bits(found, exact(row, mask=mask, inverse=inverse))


@pytest.mark.parametrize("size", [4, 12, 24, 16])
@pytest.mark.parametrize("inverse", [False, True])
def test_specials(size, inverse):
    """NaN, Inf, -0, overflow and subnormals, alone and together."""
    big, tiny = 3.4028234663852886e38, 2.0**-149
    cases = [[v] + [w] * (size - 1) for v in (NAN, math.inf, 1.0, -0.0, big, tiny) for w in (-0.0, 0.0, 1.0, big, tiny)]
    cases += [[math.inf, -math.inf] + [0.0] * (size - 2), [-0.0] * size, [-NAN] + [1.0] * (size - 1)]
    for case in cases:
        y = hadamard(torch.tensor(case), size, 0b101, inverse=inverse)
        assert_same_bits(y, exact(torch.tensor(case).tolist(), mask=0b101, inverse=inverse), what=case)


def test_a_sum_of_zero_has_no_sign_with_a_base():
    assert not hadamard(torch.full((12,), -0.0), 12).signbit().any()
    assert hadamard(torch.full((4,), -0.0), 4).signbit().tolist() == [True, False, False, False]


@pytest.mark.parametrize("size", [1, 2, 12, 40, 156, 924, 4096, 5120, 11008])
def test_columns_of_the_identity_are_the_matrix(size):
    rows = torch.eye(size)[:: max(1, size // 64)]
    h = hadamard_matrix(size).float()
    assert torch.equal(hadamard(rows, None), h[:: max(1, size // 64)] * root(size))
    assert torch.equal(hadamard(rows, "full", inverse=True), h.T[:: max(1, size // 64)] * root(size))


@pytest.mark.parametrize("size", [1, 16, 20, 172, 1024, 5120])
def test_the_inverse_undoes_a_transform(size):
    """Within rounding: each of at most 50 sums and two products of magnitudes near |x| loses half a place."""
    x, mask = normal(4, size, seed=3), random_signs(size, 9)
    y = hadamard(x, size, mask)
    assert (hadamard(y, size, mask, inverse=True) - x).abs().max() < 1e-5
    assert abs(float(y.norm() / x.norm()) - 1) < 1e-5
    assert size == 1 or (hadamard(y, size, inverse=True) - x).abs().max() > 0.1  # without the signs it does not


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16, torch.float64])
def test_dimensions_strides_and_dtypes(dim, dtype):
    x = wide(24, 48, 12, low=-3, high=3).to(dtype)
    wanted = hadamard(x.movedim(dim, -1).contiguous().float(), 12, 77).movedim(-1, dim)
    y = hadamard(x, 12, 77, dim=dim)
    assert same_bits(y, wanted) and y.is_contiguous()
    assert_same_bits(hadamard(x.mT, 12, 77, dim=dim), hadamard(x.mT.contiguous(), 12, 77, dim=dim))


def test_large_tensors_are_transformed_in_parts_that_agree():
    x = normal(520, 5120)
    y = hadamard(x, None, 3)
    assert_same_bits(y[[0, 50, 51, 519]], hadamard(x[[0, 50, 51, 519]], None, 3))
    assert_same_bits(hadamard(x.T, None, 3, dim=0).T, y)
    assert_same_bits(hadamard(x, 16)[300:], hadamard(x[300:], 16))


def test_a_default_device_or_dtype_changes_nothing():
    """Meta tensors hold nothing: whatever was made on that device would fail."""
    base_matrix.cache_clear()
    x, wanted = wide(2, 24), hadamard(wide(2, 24), 24, 3)
    base_matrix.cache_clear()
    mask_bits.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert same_bits(hadamard(x, 24, 3), wanted) and same_bits(
                hadamard(x, 24, 3, matrix=hadamard_matrix(12)), wanted
            )
    finally:
        torch.set_default_dtype(torch.float32)


def test_empty_tensors():
    assert hadamard(torch.zeros(0, 16), 16).shape == (0, 16)
    assert hadamard(torch.zeros(16, 0), 16, dim=0).shape == (16, 0)


# A matrix of one's own.


def test_a_matrix_of_ones_own():
    h = hadamard_matrix(28)
    x = wide(4, 56, seed=2)
    for dtype in (torch.int8, torch.float32, torch.int64):
        assert_same_bits(hadamard(x, 56, 9, matrix=h.to(dtype)), hadamard(x, 56, 9))
    turned = h[torch.randperm(28, generator=torch.Generator().manual_seed(1))]
    y = hadamard(x, 56, matrix=turned)
    assert not same_bits(y, hadamard(x, 56))
    for row, found in zip(x.tolist(), y, strict=True):
        assert_same_bits(found, exact(row, base=turned))
    assert (hadamard(y, 56, matrix=turned, inverse=True) - x).abs().max() < 1e-6 * x.abs().max()
    bare = hadamard(wide(1, 16), 16, matrix=hadamard_matrix(16))  # a base of 16: four sums of four, no butterflies
    assert_same_bits(bare[0], exact(wide(1, 16)[0].tolist(), base=hadamard_matrix(16)))


# Rounding afterwards, and Transformer Engine's product.


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_rounding_is_the_projects_cast(dtype):
    x = torch.cat([wide(64, 16), torch.full((1, 16), 1e38), torch.tensor([[NAN, -0.0] + [1.0] * 14])])
    y = hadamard(x, 16, 5, round_to=dtype)
    assert_same_bits(y, fmtsim.quantize(hadamard(x, 16, 5), dtype, overflow="ieee", out_dtype=dtype))
    assert y.isinf().any() and y.isnan().any()
    assert hadamard(x, 16, round_to=torch.float32).dtype == torch.float32


UNITS = ("ampere.mma", "hopper.mma", "hopper.wgmma", "blackwell.mma", "blackwell.tcgen05")


def transformer_engine(x: torch.Tensor, unit: str) -> torch.Tensor:
    """Multiply by ``diag(s) H / 4`` on a tensor core, and round to bfloat16."""
    signs = torch.where(sign_bits(TE_SIGNS, 16), -1.0, 1.0)
    matrix = (signs[:, None] * hadamard_matrix(16) / 4).to(BF16)
    return fmtsim.quantize(fmtsim.mma(x, matrix.T, target=unit), BF16, overflow="ieee", out_dtype=BF16)


def groups(octaves: int, lowest: int = -100) -> torch.Tensor:
    """Return bfloat16 groups of 16 whose exponents reach over so many octaves; some elements are zeros."""
    g = torch.Generator().manual_seed(octaves)
    shape = (4096, 16)
    first = torch.randint(lowest, 110, (4096, 1), generator=g)
    magnitude = (1 + torch.randint(0, 128, shape, generator=g) / 128.0).double()
    magnitude *= 2.0 ** (first + torch.randint(0, octaves + 1, shape, generator=g)).double()
    sign = torch.randint(-8, 9, shape, generator=g).sign()
    return (magnitude * sign).to(BF16)


@pytest.mark.parametrize("unit", UNITS)
def test_transformer_engines_bits_where_exponents_are_close(unit):
    for x in (groups(0), groups(5), groups(12), groups(12, -133).clamp(-1e-30, 1e-30)):
        y, wanted = hadamard(x, 16, TE_SIGNS, round_to=BF16), transformer_engine(x, unit)
        some = (x != 0).any(1)
        assert_same_bits(y[some], wanted[some])


def test_transformer_engines_bits_may_differ_elsewhere():
    """The example of docs/transforms.md; and the sign of zeros."""
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([258.0, 1.0, -(2.0**-17)])
    plain = (hadamard_matrix(16) / 4).to(BF16)
    for unit in UNITS[1:]:  # Ampere cuts the smallest term, and agrees
        assert float(fmtsim.quantize(fmtsim.mma(x.to(BF16), plain, target=unit), BF16)[0, 0]) == 64.5
    assert float(hadamard(x.to(BF16), 16, round_to=BF16)[0, 0]) == 65.0
    zeros = torch.full((1, 16), -0.0, dtype=BF16)
    assert hadamard(zeros, 16)[0, 0].signbit() and not fmtsim.mma(zeros, plain, target=UNITS[0])[0, 0].signbit()
    wide = groups(24)
    assert not same_bits(hadamard(wide, 16, TE_SIGNS, round_to=BF16), transformer_engine(wide, "blackwell.mma"))


# Derivatives, batches, compilation, devices.


def test_derivatives_are_transforms():
    x, g = wide(3, 24).to(BF16).requires_grad_(), wide(3, 24, seed=1)
    y = hadamard(x, 24, 5)
    y.backward(g)
    assert_same_bits(x.grad, hadamard(g, 24, 5, inverse=True, round_to=BF16))
    value, tangent = jvp(lambda a: hadamard(a, 24, 5), (x.detach(),), (g.to(BF16),))
    assert same_bits(value, y.detach()) and same_bits(tangent, hadamard(g.to(BF16), 24, 5))
    z = x.detach().float().requires_grad_()
    (first,) = torch.autograd.grad((hadamard(z, 24) ** 2).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    torch.testing.assert_close(second, torch.full_like(z, 2.0))  # x -> |x H|^2 = |x|^2; rounding moves the last places


def test_batches():
    x, signs = wide(3, 8, 24), wide(3, 24, seed=1)
    y = hadamard(x, 24, 5)
    assert_same_bits(vmap(lambda a: hadamard(a, 24, 5))(x), y)
    assert_same_bits(vmap(lambda a: hadamard(a, 8, 5, dim=1), in_dims=2, out_dims=2)(x), hadamard(x, 8, 5, dim=1))
    assert_same_bits(vmap(lambda a, s: hadamard(a, 24, s))(x, signs)[1], hadamard(x[1], 24, signs[1]))


def test_compiled_programs():
    def layer(a):
        return hadamard(a, None, (1 << 200) + 7, round_to=BF16)

    x = wide(2, 240).requires_grad_()
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    y.float().sum().backward()
    gradient = x.grad.clone()
    x.grad = None
    layer(x).float().sum().backward()
    assert same_bits(y, layer(x)) and same_bits(gradient, x.grad)
    for rows in (2, 5, 7):
        more = wide(rows, 240, seed=rows)
        assert_same_bits(torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)(more), layer(more))
    arguments = (x.detach(), 240, -1, False, "5", None, None)
    torch.library.opcheck(torch.ops.fmtsim.hadamard.default, arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [1, 2, 16, 128, 20, 156, 1024, 5120])
def test_the_gpu_has_the_same_bits(size):
    x, mask = wide(96, 2 * size if size == 156 else 5120), random_signs(size, 4)
    x[0, 0], x[1, 1], x[2] = NAN, math.inf, -0.0
    for inverse in (False, True):
        wanted = hadamard(x, size, mask, inverse=inverse)
        assert_same_bits(hadamard(x.cuda(), size, mask, inverse=inverse), wanted)
        assert_same_bits(hadamard(x.T.cuda(), size, mask, inverse=inverse, dim=0), wanted.T)
        narrow = hadamard(x.to(BF16), size, mask, inverse=inverse, round_to=BF16)
        assert_same_bits(hadamard(x.to(BF16).cuda(), size, mask, inverse=inverse, round_to=BF16), narrow)


# Errors.

X = torch.zeros(4, 24)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (DtypeError, "x is list, not a tensor", lambda: hadamard([1.0], 1)),
        (DtypeError, "x has dtype torch.int32; pass float16", lambda: hadamard(X.int(), 24)),
        (ArgumentError, "x has no dimensions", lambda: hadamard(torch.tensor(1.0), None)),
        (
            ArgumentError,
            "dim=2 is not a dimension of x of shape .4, 24.; choose -2 to 1",
            lambda: hadamard(X, 24, dim=2),
        ),
        (ArgumentError, "size=30 has no .* here; choose 28 or 32", lambda: hadamard(X, 30)),
        (ArgumentError, "size='all' has no", lambda: hadamard(X, "all")),
        (ArgumentError, "size=47 has no .* choose 44 or 48", lambda: hadamard(torch.zeros(2, 47), None)),
        (ArgumentError, "size=16 does not divide the last dimension of x .4, 24.", lambda: hadamard(X, 16)),
        (ArgumentError, "size=12 does not divide dimension -2 of x .4, 24.", lambda: hadamard(X, 12, dim=0)),
        (ArgumentError, "signs=16 is not a mask of 4 bits", lambda: hadamard(X, 4, 16)),
        (ArgumentError, "signs have shape .5,.; pass one for each of 4", lambda: hadamard(X, 4, torch.ones(5))),
        (ArgumentError, "round_to=torch.float64 is not allowed", lambda: hadamard(X, 4, round_to=torch.float64)),
        (ArgumentError, "matrix is list; pass a tensor", lambda: hadamard(X, 4, matrix=[[1]])),
        (ArgumentError, "matrix is .2, 2.; pass a tensor", lambda: hadamard(X, 4, matrix=hadamard_matrix(2))),
        (
            ArgumentError,
            "size=24 is not the order of .*times a power",
            lambda: hadamard(X, 24, matrix=torch.ones(8, 8)),
        ),
        (ArgumentError, "rows that are not orthogonal", lambda: hadamard(X, 4, matrix=torch.ones(4, 4))),
        (ArgumentError, "elements other than", lambda: hadamard(X, 4, matrix=hadamard_matrix(4) / 2)),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()
