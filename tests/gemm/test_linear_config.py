"""LinearConfig: which quantiser belongs to which operand, and what a wrong field is told."""

import pytest

from fmtsim.errors import ArgumentError, FormatError
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.gemm.units.unit import get_unit
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer


def test_helper_places_formats_and_roundings():
    config = linear_config(x="e4m3", w="e3m4", g="e5m2", rounding="toward_zero", grad_rounding="stochastic")
    names = {operand: (q.format.name, q.rounding.mode) for operand, q in config.operands.items()}
    x, w, g = ("e4m3", "toward_zero"), ("e3m4", "toward_zero"), ("e5m2", "stochastic")
    assert names == {"x_f": x, "w_f": w, "g_d": g, "w_d": w, "g_w": g, "x_w": x}
    assert (config.wgrad.a, config.wgrad.b) == (config.operands["g_w"], config.operands["x_w"])


def test_defaults_leave_everything_in_high_precision():
    assert all(q.format is None for q in LinearConfig().operands.values())
    assert linear_config(x=None, w=None, g=None) == LinearConfig()


def test_text_joins_the_uses_that_agree():
    config = linear_config(x="e4m3", w="e4m3", g="e5m2", grad_rounding="stochastic")
    assert str(config) == "x e4m3, w e4m3, g e5m2 stochastic"
    mixed = LinearConfig(fprop=config.fprop, dgrad=config.dgrad)
    assert str(mixed) == "x_f e4m3, x_w high precision, w e4m3, g_d e5m2 stochastic, g_w high precision"


def test_text_names_the_machine_once_where_all_products_have_it():
    config = linear_config(x="e4m3", w="e4m3", g="e5m2", unit="hopper.wgmma")
    assert str(config) == "x e4m3, w e4m3, g e5m2, on hopper.wgmma"
    own = Datapath(block=8, fraction_bits=9)
    assert str(linear_config(x=None, w=None, g=None, unit=own)).endswith("on blocks of 8, F=9, toward_zero to fp32")
    fast = linear_config(x="e4m3", w="e4m3", g="e5m2", target="h200", fast_accum=True)
    assert str(fast).endswith("fprop on h200, fast accumulation, dgrad on h200, wgrad on h200")
    out = Quantizer(format=get_format("e5m2"), rounding=Rounding(mode="stochastic"))
    gemm = Gemm(unit=get_unit("hopper.wgmma"), accumulate="fp16", plan=GemmPlan(), out=out)
    assert gemm.machine == "on hopper.wgmma, sums in fp16, own plan, rounded to e5m2 stochastic"
    assert (Gemm(out=out).machine, Gemm().machine) == ("rounded to e5m2 stochastic", "")


def test_configs_are_hashable_and_compare_by_value():
    one, two = (linear_config(x="e4m3", w="e4m3", g="e5m2") for _ in range(2))
    assert one == two and hash(one) == hash(two)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Quantizer(format="e4m3"), FormatError, r"format='e4m3' is not a format record.*get_format"),
        (lambda: Quantizer(rounding="up"), FormatError, r"rounding='up' is not a Rounding"),
        (lambda: Quantizer(overflow="wrap"), FormatError, r"overflow='wrap' is unknown; choose 'saturate', 'ieee'"),
        (lambda: Gemm(a="e4m3"), ArgumentError, r"a='e4m3' is not a Quantizer"),
        (lambda: LinearConfig(wgrad=Quantizer()), ArgumentError, r"wgrad=.* is not a Gemm"),
        (lambda: linear_config(x="e4m33", w=None, g=None), FormatError, r"e4m3"),
        (
            lambda: linear_config(x=None, w=None, g=None, grad_rounding="stochasti"),
            FormatError,
            r"did you mean 'stochastic'",
        ),
    ],
)
def test_wrong_fields_are_named(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_records_keep_what_they_were_given():
    q = Quantizer(format=get_format("e5m2"), rounding=Rounding(mode="stochastic", random_bits=8), overflow="ieee")
    assert str(q) == "e5m2 stochastic ieee"
