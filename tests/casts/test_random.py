# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding through the verbs: reproducible, unbiased, and gentle with everybody's generators."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmtsim
from fmtsim import RandomKey, Rounding, encode, get_format, quantize, quantize_
from fmtsim.casts.arguments import drawn_key, drawn_numbers
from fmtsim.cpu.runtime import pool
from fmtsim.support.errors import ArgumentError
from tests.support.bits import assert_same_bits, differing, same_bits
from tests.support.operands import normal

MASK64 = (1 << 64) - 1


@pytest.fixture(autouse=True)
def own_settings(one_thread):
    """Give the engine's threads and the default generator back as they were."""
    state = torch.get_rng_state()
    yield
    pool.set_num_threads(None)
    torch.set_rng_state(state)


def noisy(x: torch.Tensor, name: str = "e4m3", **options) -> torch.Tensor:
    return quantize(x, name, rounding="stochastic", **options)


# The same seed, the same bits.


def test_seeds_are_64_bits_of_either_sign():
    x = torch.full((500,), 0.3)
    first = noisy(x, generator=1)
    assert_same_bits(noisy(x, generator=RandomKey(1)), first, what="an int is a key without offset")
    assert_same_bits(noisy(x, generator=-1), noisy(x, generator=MASK64), what="-1")
    assert_same_bits(noisy(x, generator=RandomKey(1, -1)), noisy(x, generator=RandomKey(1, MASK64)), what="offset")
    others = [2, 1 + (1 << 32), 1 + (1 << 63), RandomKey(1, 1), RandomKey(1, 1 << 32), -(1 << 63), 0]
    for one, other in itertools.combinations([first, *(noisy(x, generator=key) for key in others)], 2):
        assert not same_bits(one, other)


def test_a_tensor_is_not_rounded_by_its_values_alone():
    """Equal values at different places get different words."""
    assert noisy(torch.full((64,), 0.3), generator=0).unique().numel() == 2


# Generators.


def test_a_generator_advances_and_is_never_reseeded():
    x = torch.full((500,), 0.3)
    generator = torch.Generator().manual_seed(5)
    first, second = noisy(x, generator=generator), noisy(x, generator=generator)
    assert not same_bits(first, second)
    assert generator.initial_seed() == 5
    again = torch.Generator().manual_seed(5)
    assert_same_bits(noisy(x, generator=again), first, what="first")
    assert_same_bits(noisy(x, generator=again), second, what="second")
    assert torch.equal(generator.get_state(), again.get_state())
    # One draw a call, whatever the size: 2000 elements leave the generator where 1 element leaves it.
    small, large = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    noisy(x[:1], generator=small)
    encode(x.repeat(4), "e4m3", rounding="stochastic", generator=large)
    assert torch.equal(small.get_state(), large.get_state())


def test_several_keys_are_those_of_as_many_draws():
    one, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    cpu = torch.device("cpu")
    assert drawn_numbers(5, one, cpu) == [RandomKey(*drawn_key(other, cpu).tolist()) for _ in range(5)]
    assert torch.equal(one.get_state(), other.get_state())
    torch.manual_seed(3)
    several = drawn_numbers(20, None, cpu)
    torch.manual_seed(3)
    assert several == [drawn_numbers(1, None, cpu)[0] for _ in range(20)]
    assert drawn_numbers(2, 9, cpu) == [RandomKey(9)] * 2


def test_the_default_generator_is_drawn_from_and_never_reseeded():
    x = torch.full((500,), 0.3)
    torch.manual_seed(3)
    first, second, state = noisy(x), noisy(x), torch.get_rng_state()
    assert differing(first, second) and torch.initial_seed() == 3
    torch.manual_seed(3)
    assert_same_bits(noisy(x), first, what="first")
    assert_same_bits(noisy(x), second, what="second")
    assert torch.equal(torch.get_rng_state(), state)


def test_nothing_is_drawn_where_nothing_is_random():
    generator = torch.Generator().manual_seed(5)
    states = torch.get_rng_state(), generator.get_state()
    x = normal(4, 64)
    quantize(x, "e4m3")
    assert_same_bits(quantize(x, "nvfp4", generator=generator), quantize(x, "nvfp4"), what="unused")
    noisy(x, generator=4)
    noisy(x, random_words=torch.zeros(4, 64, dtype=torch.int64))
    fmtsim.decode(encode(x, "mxfp4"))
    with pytest.raises(fmtsim.errors.FormatError):
        noisy(x, "e4m4x", generator=generator)
    with pytest.raises(ArgumentError):
        noisy(x, "mxfp4", dim=0, generator=generator)
    assert torch.equal(torch.get_rng_state(), states[0]) and torch.equal(generator.get_state(), states[1])


class Elsewhere(torch.Generator):
    """A generator on a device that this machine may lack."""

    device = torch.device("cuda:0")


def test_generators_on_another_device():
    x = torch.full((4,), 0.3)
    with pytest.raises(ArgumentError) as caught:
        noisy(x, generator=Elsewhere())
    assert str(caught.value) == "generator is on cuda:0, x on cpu; pass one on the CPU or on cpu, or an int seed"
    assert noisy(x.to("meta"), generator=torch.Generator()).device.type == "meta"
    assert noisy(x.to("meta"), generator=3).device.type == "meta"
    assert noisy(x.to("meta")).device.type == "meta"


WRONG_GENERATORS = [
    "seed", 1.5, True, (1, 2), [1], 1 << 64, -(1 << 63) - 1,
    RandomKey(1, 1 << 64), RandomKey(1 << 64, 0), RandomKey("a", 0), RandomKey(0, None), torch.tensor(3),
]  # fmt: skip


@pytest.mark.parametrize("generator", WRONG_GENERATORS, ids=repr)
def test_what_is_not_a_generator(generator):
    for verb in (quantize, encode):
        with pytest.raises(ArgumentError) as caught:
            verb(torch.ones(3), "e4m3", rounding="stochastic", generator=generator)
        assert str(caught.value) == (
            f"generator={generator!r} is not a seed; pass an int of 64 bits or a torch.Generator"
        )


# Words of one's own.

WORDS = torch.zeros(2, 3, dtype=torch.int64)
WRONG_WORDS = [
    ({"random_words": WORDS.float()},
     "random_words are torch.float32 (2, 3) on cpu; pass int64 (2, 3) on cpu"),
    ({"random_words": WORDS.int()},
     "random_words are torch.int32 (2, 3) on cpu; pass int64 (2, 3) on cpu"),
    ({"random_words": WORDS.T},
     "random_words are torch.int64 (3, 2) on cpu; pass int64 (2, 3) on cpu"),
    ({"random_words": WORDS.to("meta")},
     "random_words are torch.int64 (2, 3) on meta; pass int64 (2, 3) on cpu"),
    ({"random_words": WORDS.to_sparse()},
     "random_words has layout torch.sparse_coo; pass a dense tensor, for example random_words.to_dense()"),
    ({"random_words": [0, 1]},
     "random_words are list, not a tensor; pass int64 (2, 3) on cpu"),
    ({"random_words": WORDS + 8, "random_bits": 3},
     "random_words reach from 8 to 8; choose 0 to 2**3 - 1"),
    ({"random_words": WORDS - 1},
     "random_words reach from -1 to -1; choose 0 to 2**32 - 1"),
    ({"random_words": WORDS + (1 << 32)},
     "random_words reach from 4294967296 to 4294967296; choose 0 to 2**32 - 1"),
    ({"random_words": WORDS, "generator": 3},
     "random_words and generator exclude each other; pass one of them"),
    ({"random_words": WORDS, "rounding": "nearest_even"},
     "random_words belong to rounding='stochastic'; leave them out or choose that rounding"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG_WORDS, ids=range(len(WRONG_WORDS)))
def test_what_are_not_random_words(options, message):
    x = torch.ones(2, 3)
    for verb in (quantize, quantize_, encode):
        with pytest.raises(ArgumentError) as caught:
            verb(x, "e4m3", **{"rounding": "stochastic", **options})
        assert str(caught.value) == message
    assert_same_bits(x, torch.ones(2, 3), what="x is left alone")


def test_words_of_any_strides():
    x, words = normal(40, 64), torch.randint(0, 256, (64, 40))
    options = {"rounding": "stochastic", "random_bits": 8}
    for name in ("e4m3", "nf4", "mxfp4", "nvfp4", "logfmt8"):
        turned = quantize(x, name, pad=True, random_words=words.T, **options)
        assert_same_bits(turned, quantize(x, name, pad=True, random_words=words.T.contiguous(), **options), what=name)


# Expectation.


def expectation(x: float, name: str, bits: int, **options) -> float:
    """Return the mean over all random words of r bits, in float64, where such sums are exact."""
    words = torch.arange(1 << bits)
    values = torch.full(words.shape, x, dtype=torch.float64)
    rounding = Rounding(mode="stochastic", random_bits=bits, **options)
    return quantize(values, name, rounding=rounding, random_words=words).mean().item()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["e4m3", "e5m2", "e2m1", "e3m2", "int4", "e4m3fnuz", "int8_f6"]),
    bits=st.integers(1, 9),
    place=st.floats(0, 1, exclude_max=True, width=32),
    data=st.data(),
)
def test_the_mean_over_all_words_is_exact(name, bits, place, data):
    """Between neighbours a < b the mean is a + floor(d 2^r) / 2^r (b - a), d being x's place, for x above zero."""
    fmt = get_format(name)
    codes = range(1 << (fmt.bits - 1))
    values = sorted({v for v in (fmt.value(code) for code in codes) if 0 <= v <= fmt.max})
    low = data.draw(st.integers(0, len(values) - 2))
    step = values[low + 1] - values[low]
    d = math.floor(place * 2**12) / 2**12
    x = values[low] + d * step
    for sign in (1, -1):
        mean = expectation(sign * x, name, bits)
        assert mean == sign * (values[low] + math.floor(d * 2**bits) / 2**bits * step)


def test_variants_differ_by_their_bias():
    """What r random bits do not resolve: variant a drops it, b and c round it, half a bit at most."""
    x = 1.0 + 1 / 64
    assert expectation(x, "e4m3", 1) == expectation(x, "e4m3", 2) == 1.0
    assert expectation(x, "e4m3", 3) == x
    assert expectation(1.0 + 3 / 64, "e4m3", 1, variant="c") == 1.0625
    assert expectation(1.0 + 3 / 64, "e4m3", 1, variant="b") == 1.0625
    assert expectation(1.0 + 3 / 64, "e4m3", 1) == 1.0


def test_specials_do_not_look_at_words():
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30]).repeat(100)
    for name in ("e4m3", "e5m2", "e2m1", "fp16"):
        for overflow in ("saturate", "ieee"):
            up = noisy(x, name, overflow=overflow, random_words=torch.full(x.shape, (1 << 32) - 1))
            down = noisy(x, name, overflow=overflow, random_words=torch.zeros(x.shape, dtype=torch.int64))
            assert_same_bits(up, down, what=name)
            assert_same_bits(up, quantize(x, name, overflow=overflow), what=name)


def test_seeds_that_generators_draw_have_64_bits():
    keys = (drawn_key(torch.Generator().manual_seed(seed), torch.device("cpu")) for seed in range(32))
    seeds = [int(key[0]) for key in keys]
    assert min(seeds) < -(1 << 62) and max(seeds) > 1 << 62


def test_seeds_and_offsets_are_integers_of_64_bits():
    cpu, lowest, highest = torch.device("cpu"), -(1 << 63), (1 << 64) - 1
    assert drawn_key(lowest, cpu) == RandomKey(lowest) and drawn_key(highest, cpu) == RandomKey(-1)
    assert drawn_key(RandomKey(lowest, lowest), cpu) == RandomKey(lowest, lowest)
    assert drawn_key(RandomKey(0, highest), cpu) == RandomKey(0, -1)
    bad = lowest - 1, highest + 1, True, 1.0
    for generator in (*bad, *(RandomKey(0, number) for number in bad)):
        with pytest.raises(ArgumentError, match="is not a seed; pass an int of 64 bits or a torch.Generator"):
            drawn_key(generator, cpu)
