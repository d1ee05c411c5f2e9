# SPDX-License-Identifier: Apache-2.0
"""Operands under scale rules on the device: the bits of fmtsim/scaling, for the quantisers of recipes and beyond."""

from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim.cuda.cast import scale_rules, scaled_operands
from fmtsim.cuda.cast.layout import COLUMNS, LONG_COLUMNS, RUNS, TENSOR, TILES, matrix_layout
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.scaling import History, Scaling, TensorScale, block_scaling
from fmtsim.rounding.modes import Rounding
from fmtsim.scaling.blocks import block_sizes, statistic
from fmtsim.scaling.history import DelayedScale, FrozenScale
from fmtsim.scaling.oracle import quantize_matrix
from fmtsim.scaling.scaled_cast import cast, slope
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.operand import spread
from fmtsim.spec.quantizer import ClipMask, Quantizer, TrustMask
from fmtsim.support.errors import DeviceError
from tests.support.bits import assert_same_bits
from tests.support.casts import slow_but
from tests.support.operands import numbers

SLOW = pytest.mark.slow

KEY = RandomKey(0x1234567890ABCDEF, 5)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
E4M3, E5M2, E2M1, INT8, BF16, E8M0 = map(fmtsim.get_format, ("e4m3", "e5m2", "e2m1", "int8", "bf16", "e8m0"))
STOCHASTIC = Rounding(mode="stochastic")
QUARTET = Scaling(
    block=(1, 32), statistic="std", factor=0.48707976, offset=1e-8, arithmetic="divide", power_of_two="floor",
    scale=E8M0,
)  # fmt: skip
BACKWARD = Scaling(block=(1, 32), top=4.0, arithmetic="divide", power_of_two="floor", multiplier=4 / 3)
TOWARD_ZERO, AWAY = Rounding(mode="nearest_toward_zero"), Rounding(mode="nearest_away")
DELAYED = Quantizer(format=E4M3, scaling=Scaling(empty="previous", history=History(length=5)))
MARGIN = Scaling(top=57344.0, power_of_two="ceil", margin=1, history=History(length=4))
HISTORIES = (
    {}, {"length": 3000}, {"refresh_every": 3}, {"length": 1, "algorithm": "most_recent"}, {"immediate": 3},
)  # fmt: skip


BLOCKS = ((1, None), (None, 1), (128, 128), (1, 16), (1, 64), (16, 16), (128, 1))


def recipe_quantizers():
    """Return the quantisers with a scale rule of all recipes, by the first that has each, in bare form."""
    found = {}
    for name in fmtsim.list_recipes(kind="training"):
        recipe = fmtsim.get_recipe(name)
        rules = [getattr(rule, "linear", None) for rule in recipe.rules or ()]
        for config in filter(None, (recipe.linear, *rules)):
            for operand, quantizer in config.operands.items():
                while quantizer is not None:
                    if quantizer.scaling is not None:
                        bare = replace(quantizer, transforms=(), then=None, source="original")
                        found.setdefault(bare, f"{name}-{operand}")
                    quantizer = quantizer.then
    return {name: quantizer for quantizer, name in found.items()}


RECIPES = recipe_quantizers()


def at_once(quantizer):
    """Return a quantiser that takes its scale from the tensor itself."""
    return replace(quantizer, scaling=replace(quantizer.scaling, history=None, empty="one"))


def reference(x, quantizer, given=None):
    key = KEY if quantizer.rounding.mode == "stochastic" else None
    overflow = quantizer.overflow or quantizer.format.default_overflow
    return cast(x, quantizer.format, quantizer.scaling, quantizer.rounding, overflow, (key, None), given)


def assert_made(made, wanted):
    assert_same_bits(made.elements.float(), wanted.elements)
    assert_same_bits(made.scale, wanted.scales.scale)


def check(x, quantizer, device):
    """Hold values, scales, masks and folded values of the device to the definition's bits."""
    wanted = reference(x, quantizer)
    there = x.to(device) if x.is_contiguous() else x.mT.to(device).mT
    assert scaled_operands.covers(there, quantizer)
    keys = (KEY if quantizer.rounding.mode == "stochastic" else None, None)
    made = scaled_operands.cast_scaled(there, quantizer, keys)
    assert made.elements.dtype == torch.bfloat16 and made.elements.stride() == x.stride()
    assert_made(made, wanted)
    passes = slope(quantizer.gradient, wanted, quantizer.format)
    assert (made.slope is None) == (passes is None)
    assert passes is None or (made.slope.dtype == torch.bool and torch.equal(made.slope.cpu().float(), passes))
    if scaled_operands.folds(quantizer):
        folded = scaled_operands.cast_scaled(there, quantizer, keys, True)
        assert folded.scale is None and (quantizer.scaling.multiplier != 1) == (folded.tensor_scale is not None)
        check_folded(folded, wanted, block_sizes(quantizer.scaling.block, x.shape))


def check_folded(folded, wanted, sizes):
    """Hold element times scale to one rounding to bfloat16; the multiplier of a scale comes later, in float32."""
    if folded.tensor_scale is None:
        exact = wanted.elements.double() * spread(wanted.scales.scale, sizes, wanted.elements.shape)
        assert_same_bits(
            folded.elements.float(), exact.to(torch.bfloat16).float().masked_fill(exact.isnan(), float("nan"))
        )
        return
    own = wanted.scales.scale != 1  # the scale of blocks that hold nothing but zeros, Inf and NaN
    lives = spread(own & (wanted.scales.scale > 2.0**-110), sizes, wanted.elements.shape)
    values = folded.elements.cpu().float() * folded.tensor_scale.cpu()
    assert_same_bits(values[lives], wanted.values(sizes)[lives])


def matrix(shape, dtype, turned=False, special=True, seed=0):
    x = numbers(shape[::-1] if turned else shape, dtype, seed, special)
    return x.mT if turned else x


QUICK = ("te_current-x_f", "quartet-x_f", "quartet-g_d", "bitnet-w_f")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", slow_but(len(QUICK), *sorted(RECIPES, key=lambda name: name not in QUICK)))
def test_recipes_have_the_bits_of_the_definition(name, turned, device):
    quantizer = at_once(RECIPES[name])
    taken = scaled_operands.covers(torch.zeros(64, 64, device=device), quantizer)
    if not taken:
        assert scale_rules.rule_of(quantizer) is None
        pytest.skip("transforms of the quantiser are others' work, or it has no kernel")
    if turned and quantizer.scaling.statistic != "amax":
        assert not scaled_operands.covers(torch.zeros(64, 64, device=device).mT, quantizer)
        return
    for shape, dtype, special in (((72, 88), torch.bfloat16, True), ((64, 192), torch.bfloat16, False)):
        check(matrix(shape, dtype, turned, special), quantizer, device)


@pytest.mark.parametrize("dtype", slow_but(1, *DTYPES))
@pytest.mark.parametrize("block", [BLOCKS[0], *(pytest.param(block, marks=SLOW) for block in BLOCKS[1:])])
def test_blocks_have_the_bits_of_the_definition(block, dtype, device):
    quantizer = Quantizer(format=E4M3, scaling=Scaling(block=block, arithmetic="divide"))
    for turned in (False, True):
        for shape in ((72, 136), (8, 16)):
            check(matrix(shape, dtype, turned, special=shape == (72, 136)), quantizer, device)


def test_blocks_that_no_registers_hold(device):
    quantizer = Quantizer(format=E4M3, scaling=Scaling(block=(256, 128), arithmetic="divide"))
    check(matrix((300, 136), torch.bfloat16, False, special=False), quantizer, device)


RULES = [
    Scaling(arithmetic="double", eps=1e-12),
    Scaling(arithmetic="reciprocal", eps=1e-10, eps_rule="sum"),
    Scaling(arithmetic="multiply", eps=1e-3, eps_rule="scale"),
    Scaling(arithmetic="divide", power_of_two="ceil", allowed=(2.0**-8, 2.0**-4, 1.0, 16.0), top=60.0),
    Scaling(arithmetic="divide", allowed=(0.3, 0.7)),
    Scaling(arithmetic="encode", power_of_two="floor", margin=2),
    Scaling(arithmetic="encode", power_of_two="ceil", multiplier=1.25),
    Scaling(arithmetic="encode", factor=0.01),
    Scaling(arithmetic="reciprocal", factor=0.01, offset=1e-8, scale=E8M0),
    Scaling(arithmetic="reciprocal", offset=1e-8, scale=BF16),
    Scaling(arithmetic="divide", scale=E4M3),
    Scaling(arithmetic="divide", power_of_two="floor", scale=E8M0),
    Scaling(arithmetic="divide", power_of_two="ceil", multiplier=4 / 3),
    Scaling(arithmetic="encode", scale=E8M0),
    Scaling(arithmetic="reciprocal", eps=1e-3, eps_rule="inverse"),
    Scaling(block=(1, None), arithmetic="reciprocal", input_scale=True, eps=1e-2, eps_rule="inverse"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_have_the_bits_of_the_definition(rule, device):
    """One kernel for all rules: they are data."""
    for scale in (1.0, 0.0, 1e-38, 1e-43, 1e37):
        x = matrix((16, 72), torch.float32, special=False) * scale
        check(x, Quantizer(format=E4M3, scaling=rule), device) if scale else check_zeros(x, rule, device)


def test_a_float64_quotient_is_rounded_as_such(device):
    """``top / amax`` is 1.5 subnormal float32: a tie for one division, a little less by 1 / amax in float64."""
    x = torch.full((8, 16), 49 * 2.0**120)
    for arithmetic in ("double", "encode"):
        rule = Scaling(arithmetic=arithmetic, top=3 * 49 * 2.0**-30)
        check(x, Quantizer(format=BF16, scaling=rule), device)


def check_zeros(x, rule, device):
    for first in (-0.0, float("inf"), float("nan")):
        x[0, 0] = first
        made = scaled_operands.cast_scaled(x.to(device), Quantizer(format=E4M3, scaling=rule))
        assert_made(made, reference(x, Quantizer(format=E4M3, scaling=rule)))


@pytest.mark.parametrize(
    ("element", "rounding", "gradient"),
    slow_but(
        0, (E2M1, TOWARD_ZERO, ClipMask()), (E2M1, AWAY, TrustMask(limit=0.25)), (E5M2, STOCHASTIC, TrustMask()),
        (E5M2, Rounding(mode="stochastic", random_bits=8), ClipMask()), (INT8, TOWARD_ZERO, ClipMask()),
        (INT8, STOCHASTIC, TrustMask()), (fmtsim.get_format("e3m2"), AWAY, ClipMask()),
    ),
)  # fmt: skip
def test_elements_and_masks(element, rounding, gradient, device):
    """Ties are common: numbers of few bits under scales that are powers of two."""
    for arithmetic, overflow in (("divide", None), ("reciprocal", "ieee")):
        rule = Scaling(block=(1, 16), arithmetic=arithmetic, power_of_two="floor")
        quantizer = Quantizer(format=element, rounding=rounding, scaling=rule, gradient=gradient, overflow=overflow)
        x = matrix((40, 64), torch.bfloat16, special=False)
        check((x * 8).round() / 8, quantizer, device)
        check(matrix((40, 64), torch.bfloat16), quantizer, device)


@SLOW
@pytest.mark.parametrize("statistic", ["std", "rms", "mean_abs"])
@pytest.mark.parametrize("run", [16, 32, 64, 128])
def test_moments_are_folded_sums(statistic, run, device):
    rule = replace(QUARTET, statistic=statistic, block=(1, run))
    quantizer = Quantizer(format=E2M1, rounding=TOWARD_ZERO, scaling=rule, gradient=ClipMask())
    for shape in ((24, 192), (16, 72)):
        check(matrix(shape, torch.bfloat16, special=shape == (24, 192)), quantizer, device)
    wide = replace(quantizer, scaling=replace(rule, scale=fmtsim.get_format("fp32"), power_of_two=None))
    check(matrix((24, 192), torch.bfloat16), wide, device)  # every bit of the statistic shows in the scale


@pytest.mark.parametrize("kind", ["mean_abs", "rms"])
def test_means_of_whole_matrices(kind, device):
    rule = Scaling(statistic=kind, factor=1.0, eps=1e-5, eps_rule="scale", arithmetic="reciprocal")
    quantizer = Quantizer(format=E4M3, scaling=rule)
    for shape, dtype in (((8, 8), torch.bfloat16), ((600, 200), torch.bfloat16), ((300, 40), torch.float32)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        x[0, 0], x[0, 1] = float("nan"), float("-inf")
        check(x, quantizer, device)
    assert not scaled_operands.covers(torch.zeros(64, 72, device=device).mT, quantizer)
    for size in ((1 << 15) + 1, (1 << 20) + 8):  # the first beyond one pass of the last kernel, and beyond two
        x = torch.randn(size, generator=torch.Generator().manual_seed(4))
        wanted = statistic(x[None], (None, None), kind)[0]
        assert_same_bits(scaled_operands.mean_of(x.to(device), kind).view(torch.float32), wanted)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "block", [(1, 32), *(pytest.param(b, marks=SLOW) for b in ((1, 128), (None, None), (1, None), (32, 32)))]
)
def test_random_words_belong_to_elements(block, turned, device):
    quantizer = Quantizer(format=E2M1, rounding=STOCHASTIC, scaling=replace(BACKWARD, block=block))
    for shape in ((64, 128), (72, 88)):
        check(matrix(shape, torch.bfloat16, turned, special=False), quantizer, device)


@pytest.mark.parametrize("change", HISTORIES)
@pytest.mark.parametrize(
    "quantizer", [DELAYED, pytest.param(Quantizer(format=E5M2, rounding=STOCHASTIC, scaling=MARGIN), marks=SLOW)]
)
def test_delayed_scales_and_their_memory(quantizer, change, device):
    history = replace(quantizer.scaling.history, **change)
    quantizer = replace(quantizer, scaling=replace(quantizer.scaling, history=history))
    mine, theirs = DelayedScale(quantizer).to(device), DelayedScale(quantizer)
    for call in range(7):
        x = matrix((32, 72), torch.bfloat16, special=False, seed=call) * (0.0 if call in (0, 3) else 2.0 ** (call % 4))
        x[0, 0] = float("nan") if call == 5 else x[0, 0]
        for frozen in (True, False):
            pair = (FrozenScale(mine), FrozenScale(theirs)) if frozen else (mine, theirs)
            keys = (KEY if quantizer.rounding.mode == "stochastic" else None, None)
            made = scaled_operands.cast_scaled(x.to(device), quantizer, keys, delayed=pair[0])
            wanted = reference(x, quantizer, pair[1].advance(statistic(x, (None, None), "amax")))
            assert_made(made, wanted)
            for name in ("amaxes", "factor", "calls"):
                assert_same_bits(getattr(mine, name), getattr(theirs, name), what=name)


class Shared:
    """A memory that ranks share: its scale is advanced by torch operations."""

    group = "ranks"

    def __init__(self, memory):
        self.memory_of_all, self.amaxes = memory, []

    def advance(self, amax):
        self.amaxes.append(float(amax))
        return self.memory_of_all.advance(amax)


def test_a_scale_that_ranks_share_is_theirs(device):
    x, memory = matrix((32, 72), torch.bfloat16, special=False), DelayedScale(DELAYED).to(device)
    shared = Shared(memory)
    for _ in range(2):
        made = scaled_operands.cast_scaled(x.to(device), DELAYED, delayed=shared)
    assert shared.amaxes == [float(x.abs().max())] * 2
    assert_same_bits(made.elements.float(), reference(x, at_once(DELAYED)).elements)


def test_a_memory_elsewhere_is_refused(emulated):
    x, memory = torch.zeros(8, 16), DelayedScale(DELAYED).to("meta")
    with pytest.raises(DeviceError, match="remembers on meta, but x is on cpu; move the model"):
        scaled_operands.cast_scaled(x, DELAYED, delayed=memory)


ORACLE = [
    ("encode", (None, None)), ("reciprocal", (None, None)), pytest.param("encode", (1, 16), marks=SLOW),
    pytest.param("divide", (1, None), marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("arithmetic", "block"), ORACLE)
def test_block_formats_in_other_words_by_the_exact_oracle(arithmetic, block, device):
    fmt = BlockFormat(name="probe", element=E4M3, scaling=block_scaling(block, arithmetic=arithmetic))
    quantizer = Quantizer(format=E4M3, scaling=Scaling(block=block, arithmetic=arithmetic))
    x = matrix((6, 24), torch.float32)
    made, exact = scaled_operands.cast_scaled(x.to(device), quantizer), quantize_matrix(x.tolist(), fmt)
    assert made.scale.tolist() == exact.scales
    elements = torch.tensor([[E4M3.value(code) for code in row] for row in exact.codes])
    assert_same_bits(made.elements.float(), elements)


def test_what_is_covered():
    x, whole = torch.zeros(64, 96), Scaling()
    assert not scaled_operands.covers(x, Quantizer(format=E4M3, scaling=whole))  # no device
    for rule in (
        Scaling(block=(1, 16), scale=E4M3, tensor=TensorScale()),
        Scaling(block=(1, 16), candidates=(1.0, 1.5)),
        Scaling(block=(1, 16), scale=E4M3, scale_rounding="stochastic"),
        Scaling(allowed=tuple(map(float, range(1, 10)))),
        Scaling(statistic="one"),
        Scaling(input_scale=True),
        Scaling(power_of_two="log2"),
    ):
        assert scale_rules.rule_of(Quantizer(format=E4M3, scaling=rule)) is None
    for element in (fmtsim.get_format("fp16"), fmtsim.get_format("fp32"), fmtsim.get_format("nf4")):
        assert scale_rules.rule_of(Quantizer(format=element, scaling=whole)) is None
    for mode in ("up", "to_odd"):
        assert scale_rules.rule_of(Quantizer(format=E4M3, scaling=whole, rounding=Rounding(mode=mode))) is None


@pytest.mark.parametrize(
    ("block", "turned", "kind"),
    [
        ((None, None), False, TENSOR), ((None, None), True, TENSOR), ((1, 32), False, RUNS), ((1, 32), True, COLUMNS),
        ((1, None), False, TILES), ((1, None), True, LONG_COLUMNS), ((16, 16), True, TILES), ((32, 1), True, RUNS),
        ((1, 8), False, TILES), ((1, 12), False, None), ((1, 8), True, None),
    ],
)  # fmt: skip
def test_shapes_find_their_kernels(block, turned, kind):
    x = torch.zeros(72, 96).mT if turned else torch.zeros(72, 96)
    shape = matrix_layout(x, block, statistic="amax", stochastic=False)
    assert (shape and shape.kind) == kind
    for odd in (torch.zeros(64, 12), torch.zeros(0, 16), torch.zeros(4, 4, 8), torch.zeros(64, 96)[:, ::2]):
        assert matrix_layout(odd, block, statistic="amax", stochastic=False) is None


def test_folding():
    def folds(**rule):
        return scaled_operands.folds(Quantizer(format=E2M1, scaling=Scaling(**rule)))

    assert folds(power_of_two="ceil") and folds(scale=E8M0) and folds(scale=E4M3) and folds(allowed=(0.5, 4.0))
    assert folds(power_of_two="floor", multiplier=4 / 3)
    assert not folds() and not folds(scale=BF16) and not folds(allowed=(0.5, 3.0))
    assert not folds(multiplier=1.5) and not folds(power_of_two="ceil", multiplier=2.5)


def test_planted_errors_are_caught(emulated, monkeypatch):
    device = torch.device("cpu")
    real = scale_rules._rule
    monkeypatch.setattr(scaled_operands, "_plans", {})
    monkeypatch.setitem(scale_rules._TIES, "nearest_toward_zero", 0)  # ties to even
    with pytest.raises(AssertionError):
        test_recipes_have_the_bits_of_the_definition("quartet-x_f", False, device)
    monkeypatch.setattr(scaled_operands, "_plans", {})
    monkeypatch.setattr(scale_rules, "_rule", lambda q, s, *rest: real(q, replace(s, power_of_two=None), *rest))
    with pytest.raises(AssertionError):
        test_rules_have_the_bits_of_the_definition(RULES[5], device)
