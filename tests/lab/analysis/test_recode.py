# SPDX-License-Identifier: Apache-2.0
"""check_recode holds to what encoded tensors decode to, on both sides of every limit that it names."""

import math

import pytest
import torch

import fmtsim
from fmtsim.casts.encoded import Encoded
from fmtsim.lab.analysis.recode import carry, recode
from fmtsim.spec.cast import EncodedParts
from fmtsim.support.errors import ArgumentError, FormatError


def mxfp4(scales, seed=0):
    """Return all codes of mxfp4 under powers of two, a row each."""
    codes = torch.arange(32, dtype=torch.uint8).expand(len(scales), 32) % 16
    parts = EncodedParts(codes, torch.tensor([[2.0**e] for e in scales]))
    return Encoded.from_parts(parts, fmtsim.get_format("mxfp4"), codes.shape)


def loses(weight, fmt):
    moved = carry(weight, fmtsim.get_format(fmt))
    return not torch.equal(moved.decode(torch.float64), weight.decode(torch.float64))


@pytest.mark.parametrize(
    ("target", "span"), [("nvfp4", 2.0**17), ("e4m3_128x128", 2.0**14), ("e4m3_channel", None), ("mxfp8_e4m3", None)]
)
def test_every_code_and_scale_of_mxfp4_decodes_the_same_within_the_span_and_not_beyond(target, span):
    found = fmtsim.lab.check_recode("mxfp4", target)
    assert (found.codes, found.scales, found.held) == (15, 255, 255)
    assert (found.lowest, found.highest) == (2.0**-127, 2.0**127) and 1 in found.ratios
    for exponent in range(-120, 110):
        assert not loses(mxfp4([exponent]), target)
    if target == "e4m3_channel":  # whole rows: one scale of mxfp4 in each here
        assert found.span == 2.0**14
        return
    assert found.span == span and found.lossless is (span is None)
    if span is not None:
        steps = torch.tensor(span).log2().int().item()
        assert not loses(mxfp4(range(-steps, 1)), target)
        assert loses(mxfp4([-steps - 1, 0]), target)


@pytest.mark.parametrize(
    ("source", "target"),
    [("e4m3_1x32", "mxfp8_e4m3"), ("e4m3_1x32", "e4m3_128x128_pow2"), ("e4m3_1x32", "e4m3_128x128"), ("mxfp4", "nvfp4"),
     ("nvfp4", "mxint8"), ("nvfp4", "e4m3_channel")],
)  # fmt: skip
def test_no_scale_falls_when_it_is_carried_over(source, target):
    """Under scales over the whole range each block of the target covers its largest magnitude: none saturates."""
    random = torch.Generator().manual_seed(0)
    powers = 2.0 ** torch.randint(-12, 12, (128, 4), generator=random).repeat_interleave(32, 1)
    weight, fmt = fmtsim.encode(torch.randn(128, 128, generator=random) * powers, source), fmtsim.get_format(target)
    moved = carry(weight, fmt)
    _, scale, second, _ = moved.parts()
    height, width = (n or 128 for n in fmt.block)
    w = weight.decode(torch.float64).abs()
    covered = scale.double() * (1 if second is None else second.double()) * fmt.element.max
    assert bool((covered >= w.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3))).all())


def test_a_scale_beyond_the_largest_is_not_carried_over():
    assert carry(mxfp4([127]), fmtsim.get_format("mxint8")) is None  # 2^127 / 0.25


def test_scales_with_a_significand_are_no_powers_of_two():
    found = fmtsim.lab.check_recode("e4m3_128x128", "mxfp8_e4m3")
    assert (found.scales, found.held, found.lossless) == (508, 254, False)
    found = fmtsim.lab.check_recode("nvfp4", "mxfp4")
    assert (found.scales, found.held, found.lowest, found.highest) == (126, 18, 2.0**-9, 2.0**8)
    assert fmtsim.lab.check_recode("int4_g128", "int8_channel").span == 16.0
    quarter = fmtsim.lab.check_recode("mxfp4", "mxint8")
    assert (quarter.held, quarter.lossless) == (253, False) and "s / 0.25" in str(quarter)


def test_elements_without_a_common_multiple_lose_under_every_scale():
    found = fmtsim.lab.check_recode("mxfp8_e4m3", "mxfp4")
    assert (found.ratios, found.held, found.lossless) == ((), 0, False)
    assert str(found).startswith(
        "mxfp8_e4m3 -> mxfp4: 0 of 255 scales lose nothing (253 values x 255 scales tried)\n"
        "no multiple of the source's elements is among the target's"
    )


@pytest.mark.parametrize("target", ["mxfp8_e4m3", "e4m3_1x32", "int8_1x32", "mxfp4"])
def test_the_scale_rule_is_tried_on_blocks_of_each_largest_element(target):
    found, held = fmtsim.lab.check_recode("mxfp4", target), 0
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for exponent in range(-127, 128):
        for top in range(1, 8):
            block = torch.cat([values[: top + 1], -values[: top + 1]]).double() * 2.0**exponent
            x = torch.nn.functional.pad(block, (0, 32 - len(block)))[None]
            held += torch.equal(fmtsim.encode(x.float(), target).decode(torch.float64), x)
    assert (found.pairs, found.by_rule) == (7 * 255, held) and 0 < held < 7 * 255
    assert f"by its scale rule {held} of 1785 pairs of scale and largest element lose nothing" in str(found)


def test_the_scale_rule_is_tried_on_all_elements_where_they_fill_several_blocks():
    found, held = fmtsim.lab.check_recode("mxfp6_e2m3", "mxfp8_e4m3"), 0
    values = torch.tensor(fmtsim.get_format("e2m3").values).double()
    scales = 2.0 ** torch.arange(-127, 128).double()[:, None, None]
    for top in values[values > 0]:
        below = values[values.abs() <= top]
        x = scales * torch.stack([top.expand(len(below)), below, *[torch.zeros(len(below)).double()] * 30], 1)
        held += int((fmtsim.encode(x.float(), "mxfp8_e4m3").decode(torch.float64) == x).flatten(1).all(1).sum())
    assert (found.by_rule, found.pairs) == (held, 31 * 255) and 0 < held < found.pairs


def test_a_weight_has_the_blocks_that_change_their_places_and_the_worst_error():
    scales = torch.zeros(4, 2) + torch.tensor(1.0)
    scales[2, 1] = 2.0**-20  # below what nvfp4 has beside 1
    codes = torch.full((4, 64), 7, dtype=torch.uint8)
    weight = Encoded.from_parts(EncodedParts(codes, scales), fmtsim.get_format("mxfp4"), codes.shape)
    found = fmtsim.lab.check_recode(weight, "nvfp4")
    (row,) = found.weights
    assert (row.blocks, row.carried, row.first, row.max_relative) == (8, 1, ((2, 1),), 1 / 3) and not found.lossless
    assert "loss: 1 blocks change, SQNR 138.4 dB, largest relative error 0.333" in str(found) and "(2, 1)" in str(found)
    assert fmtsim.lab.check_recode({"a": weight, "b": torch.ones(2)}, "mxfp8_e4m3").lossless
    assert carry(fmtsim.encode(torch.ones(4, 64), "nvfp4_row"), fmtsim.get_format("mxfp8_e4m3")) is None
    other = fmtsim.lab.check_recode(fmtsim.encode(torch.randn(4, 64), "mxfp8_e4m3"), "nvfp4").weights[0]
    assert other.carried is None and other.by_rule == 8 and other.first[0] == (0, 0)


@pytest.mark.parametrize("scales", ["best", "rule", "own"])
def test_what_recoding_costs_is_what_compare_says_of_the_values(scales):
    """Of two weights one loses less under its own scales, the other by the rule; the sums are those of both."""
    torch.manual_seed(0)
    weights = {"a": mxfp4(range(-3, 3)), "b": fmtsim.encode(torch.randn(64, 64), "nvfp4"), "c": torch.ones(3),
               "d": fmtsim.encode(torch.zeros(4, 64), "mxfp4")}  # fmt: skip
    target, found = fmtsim.get_format("mxint8"), fmtsim.lab.check_recode(weights, "mxint8", scales=scales)
    pairs = [(weights[row.name].decode(), recode(row.name, weights[row.name], target, scales)[0].decode())
             for row in found.weights]  # fmt: skip
    for row, (before, after) in zip(found.weights, pairs, strict=True):
        cost = fmtsim.compare(after, before)
        if not before.any():
            assert math.isnan(row.sqnr_db) and not row.changed
            continue
        assert row.sqnr_db == pytest.approx(cost.sqnr_db) and row.max_relative == pytest.approx(cost.max_relative)
        assert row.changed == int((before != after).unflatten(1, (-1, 16 if row.name == "b" else 32)).any(-1).sum())
        assert row.scales == scales or (scales == "best" and row.sqnr_db >= row.by_rule_db)
    both = fmtsim.compare(*(torch.cat([part.flatten() for part in parts]) for parts in zip(*pairs, strict=True)))
    assert both.equal or f"SQNR {both.sqnr_db:.1f} dB" in str(found)
    assert [row.scales for row in found.weights[:2]] == ({"best": ["own", "rule"]}.get(scales) or [scales] * 2)


def test_what_is_no_format_of_blocks_is_refused():
    for a, b, message in (
        ("e4m3", "nvfp4", r"a=e4m3 has no scales; choose e4m3_channel or e4m3_tensor or e4m3_1x128$"),
        ("mxfp4", "logfmt8", r"b=logfmt8 has no scales; choose one such as nvfp4$"),
        ("mxfp4", "nvfp4_row", r"b=nvfp4_row has scales of rows above those of blocks; choose one such as nvfp4$"),
        ("mxfp4", "uint4_g32_zp", r"b=uint4_g32_zp has zero points; choose one without, such as int4_1x32$"),
        (
            "mxfp4",
            "q8_0",
            r"b=q8_0 is one of GGUF's, which fmtsim ptq --export gguf writes of a model; choose one such",
        ),
        ("mxfp4", "fp32_channel", r"b=fp32_channel_amax has elements of 32 bits; choose one of 16 or fewer$"),
        ({"x": torch.ones(2)}, "nvfp4", r"has no quantised weights; pass a checkpoint that has some"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fmtsim.lab.check_recode(a, b)
    for name in ("e4m3_channel", "e4m3_tensor", "e4m3_1x128", "int4_1x32"):  # the next steps
        assert fmtsim.lab.check_recode("mxfp4", name).target.startswith(name)
    with pytest.raises(FormatError, match=r"there is no checkpoint 'nope', and as a format: unknown format 'nope'"):
        fmtsim.lab.check_recode("nope", "nvfp4")
    with pytest.raises(FormatError, match=r"unknown format 'nvfp5'"):
        fmtsim.lab.check_recode("mxfp4", "nvfp5")
