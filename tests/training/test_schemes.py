"""Schemes: which quantisers the options of ``fmtsim train`` stand for."""

import pytest

from fmtsim.errors import ArgumentError, FormatError
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
    ],
)
def test_labels(options, label):
    assert Scheme(**options).label == label


def test_contradictions_are_named():
    with pytest.raises(FormatError, match=r"--scaling tensor does not go with mxfp4, which has blocks of its own"):
        Scheme(format="mxfp4", scaling="tensor").linear_config()
    with pytest.raises(ArgumentError, match=r"--scaling block64 is unknown; choose one of none, tensor"):
        Scheme(format="e4m3", scaling="block64").linear_config()
