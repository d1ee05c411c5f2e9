# SPDX-License-Identifier: Apache-2.0
"""Records of casts, units, plans and quantisers: their limits from both sides, and what follows from them."""

import copy
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fmtsim.formats.block import BlockFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import History, Scaling, TensorScale, block_scaling
from fmtsim.gemm.layers.config import Gemm
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import LARGE_BLOCKS, UNIT_SCALES, GemmCall, scale_kind
from fmtsim.spec.cast import CastSpec, block_counts, matrix_shape, spec_from_json
from fmtsim.spec.datapath import (
    Datapath,
    FmaDatapath,
    IntegerDatapath,
    LogDatapath,
    PairwiseDatapath,
    TwoStageDatapath,
    sum_dtype,
)
from fmtsim.spec.gemm_spec import GemmSpec, gemm_spec_from_json, record_from_dict, record_to_dict
from fmtsim.spec.operand import Operand, block_of, folds, last_cast, spread
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import (
    Clamp,
    ClipMask,
    Differentiable,
    Hadamard,
    Quantizer,
    StraightThrough,
    TrustMask,
    scaling_for,
)
from fmtsim.spec.schedule import schedule
from fmtsim.support.errors import ArgumentError, FormatError
from tests.support.refusals import refused

E4M3, E2M1, FP32, BF16, FP64 = (get_format(name) for name in ("e4m3", "e2m1", "fp32", "bf16", "fp64"))
E8M0, MX, NV = get_format("e8m0"), get_format("mxfp4"), get_format("nvfp4")
STOCHASTIC = Rounding(mode="stochastic")

REFUSED = [
    (lambda: Datapath(block=0), "block=0 is not possible; choose 1 or more, or None"),
    (lambda: Datapath(block=True), "block=True is not possible; choose 1 or more, or None"),
    (lambda: Datapath(fraction_bits=-1), "fraction_bits=-1 is not possible; choose 0 or more, or None"),
    (lambda: Datapath(promote_every=0), "promote_every=0 is not possible; choose 1 or more, or None"),
    (lambda: Datapath(group=0), "group=0 is not possible; choose 1 or more"),
    (lambda: Datapath(group=None), "group=None is not possible; choose 1 or more"),
    (lambda: Datapath(term_rounding="up"), "Datapath term_rounding='up' is not allowed; choose 'toward_zero', "),
    (lambda: Datapath(rounding="even"), "unknown rounding 'even'"),
    (lambda: Datapath(accumulator=None), "accumulator=None is not a floating-point format; pass its name or a Float"),
    (lambda: Datapath(promotion="int8"), "promotion='int8' is not a floating-point format; pass its name or a Float"),
    (lambda: Datapath(block=None, group=4), "group and paired need a block; pass block="),
    (lambda: Datapath(block=None, paired=True), "group and paired need a block; pass block="),
    (lambda: Datapath(block=16, group=3), "group=3 does not divide block=16; choose a divisor"),
    (lambda: Datapath(scale="e8m0"), f"scale={E8M0!r} and scale_block=0 belong together; pass both"),
    (lambda: Datapath(scale_block=32), "scale=None and scale_block=32 belong together; pass both"),
    (lambda: Datapath(block=64, group=16, scale="e4m3", scale_block=24), "scale_block=24 is not a multiple of group=1"),
    (lambda: Datapath(block=64, group=2, scale="e4m3", scale_block=25), "scale_block=25 is not a multiple of group=2"),
    (lambda: Datapath(block=8, paired=True, promote_every=24), "promote_every=24 does not hold whole windows of 2 * b"),
    (lambda: TwoStageDatapath(block=0), "block=0 is not possible; choose 1 or more"),
    (lambda: TwoStageDatapath(block=4, fraction_bits=0), "fraction_bits=0 is not possible; choose 1 or more"),
    (lambda: TwoStageDatapath(block=4, sum_bits=0), "sum_bits=0 is not possible; choose 1 or more"),
    (lambda: TwoStageDatapath(block=3, parity=True), "block=3 has no even and odd halves; choose an even block"),
    (lambda: PairwiseDatapath(block=0), "block=0 is not possible; choose 1 or more"),
    (lambda: FmaDatapath(block=0), "block=0 is not possible; choose 2 or more"),
    (lambda: FmaDatapath(block=3), "block=3 does not hold whole pairs of products; choose an even block"),
    (lambda: FmaDatapath(parity=1), "FmaDatapath parity=1 is not allowed; pass True or False"),
    (lambda: PairwiseDatapath(block=6), "block=6 cannot be added in pairs; choose a power of two"),
    (lambda: IntegerDatapath(block=0), "block=0 is not possible; choose 1 or more"),
    *((lambda name=name, value=value: LogDatapath(**{name: value}), f"{name}={value} is not possible; choose")
      for name, value in (("entries", 0), ("fraction_bits", -1), ("block", 0), ("accumulator_bits", 1),
                          ("guard_bits", -1))),
    (lambda: LogDatapath(block=None), "block=None is not possible; choose 1 or more"),
    (lambda: LogDatapath(entries=6), "entries=6 does not divide an octave's steps; choose a power of two"),
    (lambda: LogDatapath(accumulator_bits=6), "accumulator_bits=6 is not possible beside guard_bits=5; choose 7 to 54"),
    (lambda: LogDatapath(accumulator_bits=55), "accumulator_bits=55 is not possible beside guard_bits=5; choose 7 to"),
    (lambda: LogDatapath(accumulator_bits=48, fraction_bits=9), "a block's sum of accumulator_bits + fra"),
    *((lambda name=name, value=value: GemmPlan(**{name: value}), f"GemmPlan {name}={value!r} is not possible; choose 1")
      for name in ("k_tile", "part_k", "instruction_k", "promote_every", "split", "k_end", "lanes")
      for value in (0, True, 2.0)),
    (lambda: GemmPlan(split=None), "GemmPlan split=None is not possible; choose 1 or more"),
    (lambda: GemmPlan(owner="all"), "GemmPlan owner='all' is not allowed; choose 'contiguous', 'even', 'interleaved'"),
    (lambda: GemmPlan(reduce="tree"), "GemmPlan reduce='tree' is not allowed; choose 'serial', 'pairwise', "),
    (lambda: GemmPlan(epilogue="none"), "GemmPlan epilogue='none' is not allowed; choose 'scale', 'row_column'"),
    (lambda: GemmPlan(partial="int8"), f"partial={get_format('int8')!r} is not a floating-point format; pass its name"),
    (lambda: GemmPlan(split=2), "a plan that splits K or begins with its residue needs the width of a tile; pass k_ti"),
    (lambda: GemmPlan(residue_first=True), "a plan that splits K or begins with its residue needs the width of a tile"),
    (lambda: GemmPlan(part_k=8), "part_k=8 cuts parts that lie side by side into tiles; pass k_tile=, and no owner"),
    (lambda: GemmPlan(part_k=8, k_tile=4, owner="interleaved"), "part_k=8 cuts parts that lie side by side into tiles"),
    (lambda: GemmPlan(scaled_promotion=True), "scaled_promotion=True needs promote_every=, the products that share a"),
    (lambda: GemmPlan(successive_scales=True, promote_every=8), "successive_scales=True needs scaled_promotion=True"),
    (lambda: GemmPlan(round_trip=True), "round_trip=True needs partial=, the format to round to"),
    (lambda: GemmPlan(reduce="in_place", round_trip=True, partial="bf16"), "reduce='in_place' rounds the output after"),
    (lambda: GemmPlan(reduce="in_place", bias_after_rounding=True), "reduce='in_place' rounds the output after every"),
    (lambda: GemmPlan(lanes=4), "lanes=4 share every tile; pass k_tile=, the products of all lanes"),
    (lambda: GemmPlan(lanes=4097, k_tile=4097), "GemmPlan lanes=4097 is not possible; choose 1 to 4096"),
    (lambda: GemmPlan(lane_reduce="tree"), "lane_reduce='tree' needs lanes=, the sums that it adds"),
    (lambda: GemmPlan(lanes=2, k_tile=2, lane_reduce="pairwise"), "GemmPlan lane_reduce='pairwise' is not allowed; ch"),
    (lambda: GemmPlan(lanes=3, k_tile=6, lane_reduce="tree"), "lanes=3 cannot be added as a tree; choose a power of t"),
    (lambda: GemmPlan(lanes=6, k_tile=6, lane_reduce="pair_tree"), "lanes=6 cannot be added as a pair_tree; choose a"),
    *((lambda fields=fields, sums=sums: GemmPlan(**sums, **fields), f"{what} adds sums as they are; leave partial, sca")
      for what, sums in (("lanes=", {"lanes": 2, "k_tile": 8}), ("reduce='folded'", {"reduce": "folded"}))
      for fields in ({"partial": "bf16"}, {"scaled_promotion": True, "promote_every": 8})),
    (lambda: GemmPlan(lanes=2, k_tile=8, reduce="in_place"), "lanes= adds sums as they are; leave partial, scaled_pr"),
    (lambda: Quantizer(format="e4m"), "unknown format 'e4m'; did you mean"),
    (lambda: Quantizer(format=4), "format=4 is not a name, a format record or a dtype"),
    (lambda: Quantizer(rounding="upp"), "unknown rounding 'upp'; did you mean 'up'?"),
    (lambda: Quantizer(rounding=None), "rounding=None is not a name or a Rounding"),
    (lambda: Quantizer(overflow="wrap"), "Quantizer overflow='wrap' is not allowed; choose None, 'saturate', 'ieee'"),
    (lambda: Quantizer(source="last"), "Quantizer source='last' is not allowed; choose 'original', 'forward', 'requa"),
    (lambda: Quantizer(format=E4M3, scaling="amax"), "Quantizer scaling='amax' is not a Scaling; pass Scaling(block="),
    (lambda: Quantizer(scaling=Scaling()), "Quantizer scaling= with no format; pass an element format such as e4m3"),
    (lambda: Quantizer(format=MX, scaling=Scaling()), "Quantizer scaling= with mxfp4, which has blocks of its own;"),
    (lambda: Quantizer(format=get_format("logfmt8"), scaling=Scaling()), "Quantizer scaling= with logfmt8, which has"),
    (lambda: Quantizer(format=E4M3, gradient=ClipMask()), "Quantizer gradient=ClipMask() needs the scaled elements;"),
    *((lambda fields=fields: Quantizer(source="forward", **fields), "Quantizer source='forward' takes what the forwa")
      for fields in ({"format": E4M3}, {"transforms": (Hadamard(),)}, {"then": Quantizer()})),
    (lambda: Hadamard(size=1), "Hadamard size=1 is not allowed; choose 2 or more, or None for the whole axis"),
    (lambda: Hadamard(size=2.0), "Hadamard size=2.0 is not allowed; pass a whole number of 64 bits or None"),
    (lambda: Hadamard(axis="both"), "Hadamard axis='both' is not allowed; choose 'inner', 'outer'"),
    (lambda: Hadamard(signs=-1), "Hadamard signs=-1 is not allowed; choose None, 'random' or a mask of size bits"),
    (lambda: Hadamard(size=4, signs=16), "Hadamard signs=16 is not allowed; choose None, 'random' or a mask of size"),
    (lambda: Hadamard(size=None, signs=1), "Hadamard signs=1 is not allowed; choose None, 'random' or a mask of size"),
    (lambda: Clamp(level=0.5), "Clamp level=0.5 is not allowed; choose a quantile above 0.5, such as 0.99"),
    (lambda: Clamp(level=1.01), "Clamp level=1.01 is not allowed; choose a quantile above 0.5, such as 0.99"),
    (lambda: Clamp(level=0.9, per="column"), "Clamp per='column' is not allowed; choose 'tensor', 'row'"),
    (lambda: TrustMask(limit=0.0), "TrustMask limit=0.0 is not allowed; choose a number above 0"),
    (lambda: Differentiable(k=1.0), "Differentiable k=1.0, cap=3.0 is not allowed; choose k > 1 and cap > 0"),
    (lambda: Differentiable(cap=0.0), "Differentiable k=5.0, cap=0.0 is not allowed; choose k > 1 and cap > 0"),
    (lambda: record_from_dict({"kind": "sum"}), "kind='sum' is not a kind of unit or plan; choose one of fused, two_s"),
    (lambda: record_from_dict({"kind": "plan", "tile": 1}), "a GemmPlan has no field 'tile'; it has "),
    (lambda: schedule(9, Datapath(promote_every=16), GemmPlan(promote_every=32)), "the unit promotes every 16 product"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(make, message):
    refused(f"^{re.escape(message)}", make, error=(ArgumentError, FormatError))


def test_allowed_at_the_limits():
    for make in (
        lambda: Datapath(block=1, fraction_bits=0, promote_every=1, accumulator="fp64"),
        lambda: Datapath(block=None, fraction_bits=None, promotion="fp64"),
        lambda: Datapath(block=8, paired=True, promote_every=32),
        lambda: Datapath(block=64, group=16, scale="e4m3", scale_block=32),
        lambda: TwoStageDatapath(block=1, fraction_bits=1, sum_bits=1),
        lambda: TwoStageDatapath(block=2, parity=True),
        lambda: PairwiseDatapath(block=1),
        lambda: FmaDatapath(block=2, parity=True),
        lambda: IntegerDatapath(block=1, saturate=True),
        lambda: LogDatapath(entries=1, fraction_bits=0, block=1, accumulator_bits=2, guard_bits=0),
        lambda: LogDatapath(accumulator_bits=54, fraction_bits=2),
        lambda: GemmPlan(k_tile=1, part_k=1, instruction_k=1, promote_every=1, scaled_promotion=True,
                         successive_scales=True, partial="bf16", round_trip=True),
        lambda: GemmPlan(split=1, reduce="in_place"),
        lambda: GemmPlan(k_tile=1, lanes=4096, lane_reduce="pair_tree", reduce="folded", promote_every=1, k_end=1),
        lambda: GemmPlan(k_tile=1, lanes=3, reduce="pairwise"),
        lambda: Hadamard(size=2, signs=3, rounded=BF16),
        lambda: Hadamard(size=None, signs="random", undo=True),
        lambda: Hadamard(signs=0),
        lambda: Clamp(level=1, per="row", compensate=True),
        lambda: TrustMask(limit=1e-9),
        lambda: Quantizer(source="forward"),
        lambda: Quantizer(format=E4M3, scaling=Scaling(), gradient=TrustMask()),
    ):  # fmt: skip
        record = make()
        assert record == make() and hash(record) == hash(make())


# What records say of themselves.

TEXTS = {
    "high precision": Quantizer(),
    "the forward codes": Quantizer(source="forward"),
    "e4m3": Quantizer(format=E4M3),
    "requantised, e4m3 stochastic ieee": Quantizer(
        format=E4M3, rounding=STOCHASTIC, overflow="ieee", source="requantised"),
    "Hadamard 16, e4m3, [amax of the tensor], clip mask": Quantizer(
        format=E4M3, scaling=Scaling(), transforms=(Hadamard(),), gradient=ClipMask()),
    "e2m1, [amax of each row], then e4m3": Quantizer(
        format=E2M1, scaling=Scaling(block=(1, None)), then=Quantizer(format=E4M3)),
    "Hadamard all, of the outer axis, random signs, in bf16, undone": Hadamard(
        size=None, axis="outer", signs="random", rounded=BF16, undo=True),
    "Hadamard 8, signs 0x1f": Hadamard(size=8, signs=31),
    "clamp to 0.99 of each tensor": Clamp(level=0.99),
    "clamp to 0.9 of each row, compensated": Clamp(level=0.9, per="row", compensate=True),
    "straight through": StraightThrough(),
    "trust mask of 0.5 scales": TrustMask(),
    "DGE k=5 cap=3": Differentiable(),
    "amax of 1x16, in e4m3, tensor scale (te)": Scaling(block=(1, 16), scale=E4M3, tensor=TensorScale()),
    "amax of the tensor, to 224, margin 1, power of two by floor, max of 8 calls": Scaling(
        top=224.0, margin=1, power_of_two="floor", history=History(length=8)),
    "amax of the tensor, calibrated": Scaling(history=History(fixed=True)),
    "std of 1x32, x 0.5, in the tensor's dtype": Scaling(
        block=(1, 32), statistic="std", factor=0.5, input_scale=True),
    "amax of 1x32, exponent by even, zero point, in e8m0": Scaling(
        block=(1, 32), exponent_rule="even", zero_point=True, scale=E8M0),
    "amax of 1x16, best of 1, 1.5 by mse, EDEN over 128": Scaling(
        block=(1, 16), candidates=(1.0, 1.5), metric="mse", eden=128),
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    assert str(TEXTS[text]) == text


def test_what_follows_from_a_quantiser():
    scaled = Quantizer(format=E4M3, scaling=Scaling())
    drawn = Quantizer(format=E4M3, scaling=Scaling(scale_rounding="stochastic"))
    turned = Quantizer(format=E4M3, transforms=(Clamp(level=0.9), Hadamard(signs="random")))
    assert [q.is_cast for q in (Quantizer(format=MX), scaled, turned, Quantizer(then=scaled))] == [True] + [False] * 3
    assert Quantizer(source="requantised", format=E4M3).is_cast  # of other values, which it is given
    assert not Quantizer(source="forward").is_cast
    assert [q.is_stochastic for q in (scaled, drawn, turned)] == [False, True, False]
    assert Quantizer(format=E4M3, rounding=STOCHASTIC).is_stochastic and Quantizer(then=drawn).is_stochastic
    assert [q.is_random for q in (scaled, drawn, turned, Quantizer(then=turned))] == [False, True, True, True]
    assert [q.has_random_signs for q in (turned, Quantizer(transforms=(Hadamard(signs=1),)))] == [True, False]
    assert last_cast(Quantizer(format=E4M3, then=Quantizer(then=scaled))) is scaled
    row = Quantizer(format=E4M3, scaling=Scaling(block=(1, None)))
    assert [block_of(q) for q in (row, Quantizer(format=MX), Quantizer(format=E4M3))] == [(1, None), (1, 32), (1, 1)]
    assert block_of(Quantizer(format=MX, then=row)) == (1, None)
    own = Scaling(scale=E4M3, input_scale=True, arithmetic="divide")
    kept = {torch.bfloat16: BF16, torch.float16: get_format("fp16"), torch.float32: E4M3, torch.float64: E4M3}
    for dtype, fmt in kept.items():
        assert scaling_for(own, dtype) == replace(own, input_scale=False, scale=fmt)
    assert scaling_for(scaled.scaling, torch.bfloat16) is scaled.scaling


def test_which_operands_bfloat16_holds():
    def scaled(element, **rule):
        return Quantizer(format=get_format(element), scaling=Scaling(**rule))

    mx = [Quantizer(format=get_format(name)) for name in ("mxfp4", "mxfp8_e4m3", "nvfp4", "int8_channel")]
    assert [folds(q) for q in mx] == [True, True, True, False]
    six = BlockFormat(name="b", element=get_format("e3m4"), scaling=block_scaling((1, 8), scale=E4M3))
    five = replace(six, element=get_format("e5m3"))
    assert [folds(Quantizer(format=fmt)) for fmt in (six, five)] == [False, True]  # 5 + 4 bits, 4 + 4 bits
    assert folds(scaled("e4m3", power_of_two="floor")) and not folds(scaled("e4m3"))
    assert not folds(scaled("e4m3", power_of_two="floor", candidates=(1.0, 1.5)))
    assert folds(scaled("e4m3", power_of_two="floor", allowed=(0.5, 2.0)))
    assert not folds(scaled("e4m3", power_of_two="floor", allowed=(0.5, 0.75)))
    assert folds(scaled("e2m1", scale=E4M3)) and not folds(scaled("e3m4", scale=E4M3))
    assert folds(scaled("e4m3", scale=E8M0)) and folds(scaled("int8", scale=E8M0))
    assert not folds(scaled("nf4", scale=E8M0)) and not folds(scaled("fp16", scale=E8M0))
    assert not folds(Quantizer()) and not folds(Quantizer(format=E4M3))
    assert not folds(Quantizer(format=MX, then=scaled("e4m3")))


def test_numbers_of_blocks_reach_their_elements():
    s = torch.arange(6.0).view(2, 3)
    wide = spread(s, (2, 4), torch.Size((3, 10)))
    assert wide.tolist() == [[float(3 * (i // 2) + j // 4) for j in range(10)] for i in range(3)]
    assert spread(s, (1, 1), s.shape) is s and spread(s[:1, :1], (9, 9), torch.Size((2, 2))).tolist() == [[0.0] * 2] * 2
    assert spread(s[:, :1].contiguous(), (1, 4), torch.Size((2, 3))).tolist() == [[0.0] * 3, [3.0] * 3]


def test_scales_of_rows():
    x, q = torch.ones(5, 4), Quantizer(format=E4M3)
    two = torch.tensor(2.0)
    for operand, rows in (
        (Operand(x, q), None),
        (Operand(x, q, tensor_scale=two), [[2.0]]),
        (Operand(x, q, scale=torch.tensor([[3.0]]), block=(5, 4)), [[3.0]]),
        (Operand(x, q, scale=torch.arange(5.0).view(5, 1), block=(1, 4)), [[float(i)] for i in range(5)]),
        (Operand(x, q, scale=torch.arange(3.0).view(3, 1), block=(2, 4)), [[0.0], [0.0], [1.0], [1.0], [2.0]]),
    ):
        found = operand.row_scales()
        assert operand.scales_rows and (found if found is None else found.tolist()) == rows
    blocks = Operand(x, q, scale=torch.ones(5, 2), block=(1, 2), slope=x, rest=x)
    assert not blocks.scales_rows
    assert not Operand(x, q, scale=torch.ones(5, 1), tensor_scale=two, block=(1, 4)).scales_rows
    turned = blocks.transposed()
    assert turned.elements.shape == (4, 5) and turned.scale.shape == (2, 5) and turned.block == (2, 1)
    assert turned.slope is None and turned.rest is None and Operand(x, q).transposed().scale is None


def test_values_are_rounded_once():
    x = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    third, q = torch.tensor([[1 / 3], [1 / 7]]), Quantizer(format=E4M3)
    for dtype in (torch.float32, torch.float64):
        assert Operand(x, q).values(dtype).tolist() == x.tolist()
        assert Operand(x, q).values(dtype).dtype == dtype
        once = Operand(x, q, scale=third, block=(1, 2)).values(dtype)
        assert torch.equal(once, x.to(dtype) * third)
        both = Operand(x, q, scale=third, tensor_scale=torch.tensor(0.1), block=(1, 2)).values(dtype)
        assert torch.equal(both, (x.double() * third.double() * torch.tensor(0.1).double()).to(dtype))
    assert Operand(x, q, tensor_scale=torch.tensor(0.5)).values(torch.float32).tolist() == [[0.5, 1.5], [2.5, 3.5]]


# Casts and calls.


def test_casts_as_json():
    for rounding in (Rounding(), STOCHASTIC, Rounding(mode="stochastic", random_bits=8, layout="cvt_rs"),
                     Rounding(mode="stochastic", random_bits=3, variant="c")):  # fmt: skip
        spec = CastSpec(format=NV, rounding=rounding, overflow="ieee", dim=-2)
        assert spec_from_json(spec.to_json()) == spec and "\n" not in spec.to_json()
    assert CastSpec(format=NV, rounding=Rounding(), overflow="saturate").dim == -1


def test_casts_are_equal_by_their_fields_and_hash_anew_where_strings_hash_otherwise():
    spec = CastSpec(format=NV, rounding=STOCHASTIC, overflow="ieee", dim=-2)
    others = [replace(spec, **field) for field in (
        {"format": MX}, {"rounding": Rounding()}, {"overflow": "saturate"}, {"dim": -1})]  # fmt: skip
    assert spec not in others and spec != spec.to_json() and len({spec, replace(spec), *others}) == 5
    code = (
        "import pickle, sys, dataclasses; spec = pickle.loads(sys.stdin.buffer.read())\n"
        "print({dataclasses.replace(spec): spec.to_json()}[spec], end='')"
    )
    for seed in ("1", "2"):
        result = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(spec), capture_output=True, check=True,
                                env={**os.environ, "PYTHONHASHSEED": seed})  # fmt: skip
        assert result.stdout.decode() == spec.to_json()
    assert copy.deepcopy(spec) == spec and hash(copy.deepcopy(spec)) == hash(spec)


def test_blocks_of_a_shape():
    assert [matrix_shape(shape, dim) for shape, dim in (((), -1), ((5,), -1), ((2, 3, 4), -1), ((2, 3, 4), -3))] == [
        (1, 1), (1, 5), (6, 4), (12, 2),
    ]  # fmt: skip
    tile = get_format("e4m3_128x128")
    channel, whole = get_format("int8_channel"), get_format("int8_tensor")
    for fmt, shape, dim, counts in (
        (MX, (3, 33), -1, (3, 2)), (MX, (33, 3), -2, (3, 2)), (tile, (129, 256), -1, (2, 2)),
        (channel, (3, 7), -1, (3, 1)),
        (MX, (0, 32), -1, (0, 1)), (whole, (3, 0), -1, (1, 0)), (MX, (32, 0), -1, (32, 0)),
    ):  # fmt: skip
        assert block_counts(fmt, torch.Size(shape), dim) == counts, (fmt.name, shape)


def test_kinds_of_scales():
    kinds = {
        (None, None, "fp32"): "tensor", (1, None, "fp32"): "row", (1, 32, "e8m0"): "mx", (1, 16, "e4m3"): "nvfp4",
        (16, 16, "ue4m3"): "nvfp4", (1, 128, "fp32"): "block_128", (128, 128, "e8m0"): "block_128",
        (1, 64, "fp32"): None, (1, 32, "fp32"): None, (1, 16, "e8m0"): None, (2, None, "fp32"): None,
        (None, None, "bf16"): "tensor",
    }  # fmt: skip
    assert {key: scale_kind(*key) for key in kinds} == kinds
    assert UNIT_SCALES == ("mx", "nvfp4") and LARGE_BLOCKS == ("block_128", "row_block_128")


def test_calls_that_a_library_cannot_tell_apart():
    call = GemmCall(operation="mm", m=4, n=5, k=6, a="bf16", b="bf16", out=torch.bfloat16, target="H200", strict=True,
                    formats=(BF16, BF16), plan=GemmPlan())  # fmt: skip
    assert call.same_calls() == [call]
    for sizes, layouts in (({"m": 1}, 2), ({"n": 1}, 2), ({"k": 1}, 4), ({"m": 1, "n": 1}, 4)):
        same = replace(call, **sizes).same_calls()
        assert len(same) == len({(c.a_layout, c.b_layout) for c in same}) == layouts
        assert {c.a_layout for c in same} == ({"row", "column"} if 1 in (sizes.get("m"), sizes.get("k")) else {"row"})
    facts = call.facts()
    assert (facts.formats, facts.target, facts.plan, facts.strict) == (None, None, None, False)
    assert (facts.m, facts.n, facts.k, facts.fast_accum, facts.batch, facts.accumulate) == (4, 5, 6, True, 1, "fp32")


def test_dtypes_of_sums():
    dtypes = {
        Datapath(): torch.float32, Datapath(accumulator="bf16"): torch.float32,
        Datapath(accumulator="fp64"): torch.float64,
        Datapath(promotion="fp64", promote_every=16): torch.float64, IntegerDatapath(): torch.int32,
        TwoStageDatapath(block=4): torch.float32, PairwiseDatapath(block=4): torch.float32,
        FmaDatapath(): torch.float32,
        LogDatapath(accumulator_bits=25): torch.float32, LogDatapath(accumulator_bits=26): torch.float64,
    }  # fmt: skip
    assert {path: sum_dtype(path) for path in dtypes} == dtypes


def test_products_as_json():
    paths = (Datapath(rounding=STOCHASTIC, accumulator="bf16", scale="e8m0", scale_block=32), IntegerDatapath(block=4),
             TwoStageDatapath(block=4, parity=True), PairwiseDatapath(block=2), LogDatapath(entries=4),
             FmaDatapath(block=32, parity=True))  # fmt: skip
    own = {IntegerDatapath: get_format("int8"), LogDatapath: get_format("lns8_g8")}
    for path in paths:
        a = own.get(type(path), E4M3)
        spec = GemmSpec(datapath=path, plan=GemmPlan(k_tile=8, partial="bf16"), a=a, b=a, unit="u", basis="guess")
        back = gemm_spec_from_json(spec.to_json())
        assert back == spec and hash(back) == hash(spec) and (back.unit, back.basis) == (None, "rule")
        assert back.stochastic == spec.stochastic == (path is paths[0]) and back.sum_dtype == spec.sum_dtype
        assert record_from_dict(record_to_dict(path)) == path
    assert record_to_dict(GemmPlan(split=1)) == {"kind": "plan"}


def test_reprs_show_what_differs_from_defaults():
    assert repr(Quantizer()) == "Quantizer()" and repr(Gemm()) == "Gemm()"
    quantizer = Quantizer(format=get_format("e4m3"), rounding=STOCHASTIC)
    assert repr(quantizer) == f"Quantizer(format={get_format('e4m3')!r}, rounding=Rounding(mode='stochastic'))"
    assert repr(Datapath(block=None, fraction_bits=25)) == "Datapath(block=None)"
    assert repr(get_format("e4m3")).startswith("FloatFormat('e4m3': 8 bits")  # written out
