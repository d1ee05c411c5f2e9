# SPDX-License-Identifier: Apache-2.0
"""Files and operators leave the defaults of records out: what they mean must not change."""

import dataclasses

import pytest

from fmtsim.formats.block import FP32, BlockFormat, LogTileFormat
from fmtsim.formats.element import CodebookFormat, FloatFormat, IntFormat, LogFormat
from fmtsim.formats.scaling import History, Scaling, TensorScale
from fmtsim.lab.search import Policy
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.call import GemmCall
from fmtsim.spec.cast import CastSpec
from fmtsim.spec.datapath import Datapath, FmaDatapath, IntegerDatapath, LogDatapath, PairwiseDatapath, TwoStageDatapath
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.spec.optimizer import FLOAT32, Scheme, StateFormat
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Clamp, Differentiable, Hadamard, Quantizer, StraightThrough, TrustMask

DEFAULTS = {  # all but None, False, "" and (), which the other fields have
    FloatFormat: {"signed": True, "nan": "ieee", "infinities": True, "has_zero": True, "has_subnormals": True,
                  "nan_policy": "max"},
    IntFormat: {"signed": True, "symmetric": True, "fraction_bits": 0, "nan_policy": "max"},
    CodebookFormat: {"nan_policy": "max"},
    LogFormat: {"nan_policy": "max"},
    BlockFormat: {},
    LogTileFormat: {"block": (1, 128)},
    Scaling: {"block": (None, None), "statistic": "amax", "offset": 0.0, "margin": 0, "eps": 0.0,
              "eps_rule": "statistic", "arithmetic": "encode", "multiplier": 1.0, "scale": FP32,
              "scale_rounding": "nearest_even", "candidates": (1.0,), "metric": "mae", "empty": "one"},
    History: {"length": 1024, "algorithm": "max", "refresh_every": 1, "immediate": 0},
    TensorScale: {"order": "te", "block": (None, None)},
    Rounding: {"mode": "nearest_even", "variant": "a", "layout": "word"},
    CastSpec: {"dim": -1},
    Quantizer: {"rounding": Rounding(), "source": "original", "gradient": StraightThrough()},
    Hadamard: {"size": 16, "axis": "inner"},
    Clamp: {"per": "tensor"},
    TrustMask: {"limit": 0.5},
    Differentiable: {"k": 5.0, "cap": 3.0},
    Datapath: {"block": 16, "fraction_bits": 25, "term_rounding": "toward_zero",
               "rounding": Rounding(mode="toward_zero"), "accumulator": FP32, "group": 1, "scale_block": 0},
    TwoStageDatapath: {"fraction_bits": 24, "sum_bits": 31},
    PairwiseDatapath: {},
    FmaDatapath: {"block": 2},
    IntegerDatapath: {"accumulator_bits": 32, "block": 32},
    LogDatapath: {"entries": 8, "fraction_bits": 8, "block": 32, "accumulator_bits": 24, "guard_bits": 5},
    GemmPlan: {"split": 1, "lanes": 1, "lane_reduce": "serial", "owner": "contiguous", "reduce": "serial",
               "epilogue": "scale"},
    GemmCall: {"accumulate": "fp32", "fast_accum": True, "scaling": "none", "a_layout": "row", "b_layout": "row",
               "batch": 1},
    GemmSpec: {"accumulate": "fp32", "basis": "rule"},
    StateFormat: {"ties": "even", "least_of": "numbers"},
    Scheme: {"first": FLOAT32, "second": FLOAT32, "minimum": 0, "decay": "before", "nonfinite": "propagate"},
    Policy: {"steps": 200, "rate": 0.5, "penalty": 0.5, "entropy": 0.05, "sharpen": 0.0, "seed": 0},
}  # fmt: skip


def _shape(default):
    """Return a default that can be compared: a Datapath's own accumulator is another record of the same numbers."""
    return dataclasses.replace(default, source="", aliases=()) if isinstance(default, FloatFormat) else default


@pytest.mark.parametrize("record", DEFAULTS, ids=lambda record: record.__name__)
def test_defaults(record):
    given = {f.name: f.default for f in dataclasses.fields(record) if f.default is not dataclasses.MISSING}
    told = {name: _shape(v) for name, v in given.items() if v is not None and v is not False and v not in ("", ())}
    assert told == {name: _shape(v) for name, v in DEFAULTS[record].items()}
