"""Schemes: which quantisers the options of ``fmtsim train`` stand for."""

import json

import pytest

from fmtsim.errors import ArgumentError, FormatError
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.gemm_spec import record_from_dict
from fmtsim.spec.plan import GemmPlan
from fmtsim.training.schemes import SCALINGS, Scheme


def blocks(**options):
    operands = Scheme(**options).linear_config().operands
    return {name: getattr(q.format, "block", None) for name, q in operands.items()}


def test_defaults_follow_the_width_of_the_format():
    assert set(blocks(format="e4m3").values()) == {(None, None)}
    assert set(blocks(format="bf16").values()) == {None}
    assert set(blocks(format="mxfp8_e4m3").values()) == {(1, 32)}
    assert [Scheme(format=f).gradient for f in ("e4m3", "e2m1", "bf16", "nvfp4")] == ["e5m2", "e5m2", "bf16", "nvfp4"]


def test_tiles_are_square_for_weights_alone():
    assert blocks(format="e4m3", scaling="tile128") == {
        "x_f": (1, 128), "x_w": (1, 128), "g_d": (1, 128), "g_w": (1, 128), "w_f": (128, 128), "w_d": (128, 128),
    }  # fmt: skip


def test_mx_scales_are_powers_of_two():
    fmt = Scheme(format="e2m1", scaling="mx").linear_config().fprop.a.format
    assert fmt.power_of_two and fmt.scale.name == "e8m0" and fmt.block == (1, 32)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_builds(scaling):
    config = Scheme(format="e4m3", grad_format="e5m2", scaling=scaling, grad_rounding="stochastic").linear_config()
    assert config.wgrad.a.rounding.mode == "stochastic" and config.wgrad.b.rounding.mode == "nearest_even"


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"format": "fp32"}, "fp32"),
        ({"format": "e4m3"}, "e4m3/e5m2, scaled by tensor"),
        ({"format": "bf16"}, "bf16, unscaled"),
        ({"format": "mxfp4", "grad_rounding": "stochastic"}, "mxfp4, g SR"),
        ({"format": "e2m1", "scaling": "none", "rounding": "up", "grad_rounding": "up"}, "e2m1/e5m2, unscaled, up"),
        ({"format": "e4m3", "unit": "hopper.wgmma"}, "e4m3/e5m2, scaled by tensor, on hopper.wgmma"),
        ({"format": "fp32", "target": "h200"}, "fp32, unscaled, on h200"),
        (
            {"format": "e4m3", "target": "h200", "fast_accum": True},
            "e4m3/e5m2, scaled by tensor, on h200, fast accumulation",
        ),
        (
            {"format": "bf16", "unit": Datapath(block=32, fraction_bits=10), "plan": GemmPlan(promote_every=64)},
            "bf16, unscaled, on blocks of 32, F=10, toward_zero to fp32, own plan",
        ),
    ],
)
def test_labels(options, label):
    assert Scheme(**options).label == label


def test_the_machine_reaches_every_product():
    unit, plan = Datapath(block=8), GemmPlan(promote_every=64)
    config = Scheme(format="e4m3", unit=unit, plan=plan).linear_config()
    assert all(gemm.unit == unit and gemm.plan == plan for gemm in (config.fprop, config.dgrad, config.wgrad))
    config = Scheme(format="e4m3", target="h200", fast_accum=True).linear_config()
    assert [gemm.fast_accum for gemm in (config.fprop, config.dgrad, config.wgrad)] == [True, False, False]
    assert Scheme(format="fp32", target="h200").simulated and not Scheme(format="fp32").simulated


def test_records_hold_plain_types():
    scheme = Scheme(format="e4m3", unit=Datapath(block=8, accumulator="bf16"), plan=GemmPlan(promote_every=64))
    fields = json.loads(json.dumps(scheme.to_dict()))
    assert record_from_dict(fields["unit"]) == scheme.unit and record_from_dict(fields["plan"]) == scheme.plan
    assert Scheme(**{**fields, "unit": scheme.unit, "plan": scheme.plan}) == scheme


def test_contradictions_are_named():
    with pytest.raises(FormatError, match=r"--scaling tensor does not go with mxfp4, which has blocks of its own"):
        Scheme(format="mxfp4", scaling="tensor").linear_config()
    with pytest.raises(ArgumentError, match=r"--scaling block64 is unknown; choose one of none, tensor"):
        Scheme(format="e4m3", scaling="block64").linear_config()
    with pytest.raises(FormatError, match=r"no unit multiplies e4m3_block32, whose blocks of \(1, 32\) have fp32"):
        Scheme(format="e4m3", scaling="block32", unit="hopper.wgmma").linear_config()
