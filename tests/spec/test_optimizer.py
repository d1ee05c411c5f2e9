# SPDX-License-Identifier: Apache-2.0
"""How optimizer states are kept: sizes, formats of a parameter, keys of random words, codebooks of kernels."""

from dataclasses import replace

import pytest
import torch

from fmtsim.formats.element import CodebookFormat
from fmtsim.formats.registry import get_format
from fmtsim.optim.catalogue import scaled_state
from fmtsim.rounding.codebooks import BUCKETS, LOWEST_KEY, table_of
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.cast import RandomKey
from fmtsim.spec.optimizer import (
    FLOAT32,
    KINDS,
    Numbers,
    ParameterStep,
    Scheme,
    StateFormat,
    in_parameter,
    key_of,
    state_codebook,
)

E4M3, BF16, FP16 = (get_format(name) for name in ("e4m3", "bf16", "fp16"))
SIXTEEN = CodebookFormat(name="sixteen", values=tuple((k - 7) / 8 for k in range(16)))
DYNAMIC = get_format("bnb_dynamic8")


@pytest.mark.parametrize(
    ("fmt", "shape", "size"),
    [
        (FLOAT32, (3, 5), 60),
        (FLOAT32, (), 4),
        (StateFormat(format=E4M3), (3, 5), 15),
        (scaled_state(E4M3, "amax"), (3, 5), 15 + 4),
        (scaled_state(E4M3, "amax", (1, 4)), (3, 5), 15 + 4 * 4),
        (scaled_state(E4M3, "amax", (1, 4), expand=True), (3, 5), 15 + 12 * 4),
        (scaled_state(SIXTEEN, "amax", (1, None)), (3, 5), 8 + 4 * 3),
        (scaled_state(SIXTEEN, "amax", (1, None)), (0, 5), 0),
        (scaled_state(SIXTEEN, "amax", (1, None)), (), 1 + 4),
    ],
)
def test_bytes_of_a_state(fmt, shape, size):
    assert fmt.bytes_of(shape) == size


def test_what_shares_a_scale():
    blocks = {block: scaled_state(E4M3, "amax", block) for block in ((None, None), (1, None), (1, 2), (1, 64))}
    assert [fmt.block_of((3, 5)) for fmt in blocks.values()] == [15, 5, 2, 64]
    assert [fmt.block_of((0, 5)) for fmt in blocks.values()] == [1, 5, 2, 64]
    assert [FLOAT32.bits, blocks[1, 2].bits, StateFormat(format=SIXTEEN).bits] == [32, 8, 4]
    assert StateFormat(format=BF16).bits == 16  # the widest that is packed
    stochastic = StateFormat(format=E4M3, rounding=Rounding(mode="stochastic"))
    assert stochastic.stochastic and not FLOAT32.stochastic


def test_formats_of_a_parameter():
    first, second, weights = (scaled_state(f, "amax", (1, 8)) for f in (E4M3, DYNAMIC, BF16))
    scheme = Scheme(name="s", first=first, second=second, minimum=16)
    both, one = ("first", "second"), ("first",)
    assert scheme.formats((4, 4), both) == {"first": first, "second": second}
    assert scheme.formats((4, 4), one) == {"first": first} and scheme.formats((4, 4), ()) == {}
    assert scheme.formats((3, 5), both) == {"first": FLOAT32, "second": FLOAT32}  # fewer than 16
    assert scheme.formats((17,), both) == {"first": first, "second": second}
    whole = replace(scheme, whole_blocks=True, second=scaled_state(DYNAMIC, "amax", (1, None)))
    assert whole.formats((17,), both) == {"first": FLOAT32, "second": whole.second}
    kept = replace(scheme, weights=weights)
    assert kept.formats((17,), one) == {"first": first, "weights": weights}
    assert kept.formats((3,), one) == {"first": FLOAT32, "weights": weights}
    matrices = replace(kept, matrices=True)
    assert "weights" not in matrices.formats((17,), one) and matrices.formats((4, 4), ())["weights"] is weights


def test_keys_of_states_do_not_meet():
    assert KINDS == ("first", "second", "weights")
    assert key_of(7, 1, 0, "first") == RandomKey(7, 1 << 22) and key_of(7, 0, 3, "weights") == RandomKey(7, 14)
    assert key_of(7, 5, (1 << 20) - 1, "second") == RandomKey(7, (((5 << 20) + (1 << 20) - 1) << 2) + 1)
    assert key_of(7, 1 << 62, 1, "first") == RandomKey(7, 4)  # modulo 2**63
    assert key_of(7, (1 << 41) - 1, 0, "first").offset == ((1 << 41) - 1) << 22
    step = ParameterStep(torch.ones(1), torch.ones(1), {}, 9, {}, Numbers(), 7, 3)
    assert step.key("second") == key_of(7, 9, 3, "second")
    step.done()
    assert step.state == {"step": 9}
    assert Numbers() == (1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, float("inf"))


def test_weights_that_a_parameter_holds_itself():
    cases = ((BF16, torch.bfloat16), (FP16, torch.float16), (BF16, torch.float16), (FP16, torch.float32))
    assert [in_parameter(StateFormat(format=fmt), dtype) for fmt, dtype in cases] == [True, True, False, False]
    assert not in_parameter(scaled_state(BF16, "amax"), torch.bfloat16)
    assert not in_parameter(FLOAT32, torch.float32)


def test_codebooks_that_kernels_know():
    for element in (DYNAMIC, SIXTEEN, get_format("bnb_dynamic8_unsigned")):
        values = element.values if element.values[-1] == 1 else (*element.values[:-1], 1.0)
        element = CodebookFormat(name="b", values=values)
        for ties in ("even", "up"):
            fmt = scaled_state(element, "amax", ties=ties, least=1e-9, keep_sign=True)
            book, table = state_codebook(fmt), table_of(element, ties)
            assert book is not None and book.values.tolist() == list(values)
            assert (book.lowest, book.least) == (LOWEST_KEY, 1e-9)
            assert state_codebook(replace(fmt, keep_sign=False)).words.tolist() == table.words.tolist()
            assert book.words[:BUCKETS].tolist() == table.words[:BUCKETS].tolist()
            for offset in (0, 1 << 15, 0xFFFF):
                kept, plain = ((words >> 17) + (offset >= (words & 0x1FFFF)) for words in (book.words, table.words))
                nearest_is_zero = plain[BUCKETS:] == values.index(0.0)
                assert nearest_is_zero.any()
                assert (kept[BUCKETS:] == (plain[BUCKETS:] - nearest_is_zero) % len(values)).all()
    close = CodebookFormat(name="c", values=(*(0.5 + k / 1e5 for k in range(15)), 1.0))
    for other in (
        scaled_state(E4M3, "amax"),
        scaled_state(DYNAMIC, "inverse"),
        scaled_state(DYNAMIC, "amax", expand=True),
        scaled_state(CodebookFormat(name="d", values=(-1.0, 0.0, 1.0)), "amax"),
        scaled_state(CodebookFormat(name="d", values=(*SIXTEEN.values[:-1], 0.99)), "amax"),
        scaled_state(close, "amax"),
    ):
        assert state_codebook(other) is None, other
