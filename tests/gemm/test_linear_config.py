# SPDX-License-Identifier: Apache-2.0
"""LinearConfig: which quantiser belongs to which operand; what configs and EmulatedGEMM refuse."""

import pytest
import torch

from fmtsim import EmulatedGEMM
from fmtsim.formats.block import scaled
from fmtsim.formats.registry import get_format
from fmtsim.gemm.layers.config import Gemm, LinearConfig, linear_config
from fmtsim.gemm.units.unit import get_unit
from fmtsim.rounding.modes import Rounding
from fmtsim.spec.datapath import Datapath
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, DtypeError, FormatError
from tests.support.operands import normal
from tests.support.refusals import refused


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
    # a rounding that does not reach all operands: the others say theirs
    away = linear_config(x="e4m3", g="e5m2", rounding="nearest_away")
    assert str(away) == "x e4m3 nearest_away, w e4m3 nearest_away, g e5m2 nearest_even"
    taken = linear_config(x=Quantizer("e4m3"), w="e5m2", rounding="nearest_away", grad_rounding="nearest_away")
    assert str(taken) == "x e4m3 nearest_even, w e5m2 nearest_away, g e4m3 nearest_even"
    mixed = LinearConfig(fprop=config.fprop, dgrad=config.dgrad)
    assert str(mixed) == "x_f e4m3, x_w high precision, w e4m3, g_d e5m2 stochastic, g_w high precision"


def test_text_names_the_machine_once_where_all_products_have_it():
    config = linear_config(x="e4m3", w="e4m3", g="e5m2", target="hopper.wgmma")
    assert str(config) == "x e4m3, w e4m3, g e5m2, on hopper.wgmma"
    own = Datapath(block=8, fraction_bits=9)
    assert str(linear_config(x=None, w=None, g=None, target=own)).endswith("on blocks of 8, F=9, toward_zero to fp32")
    fast = linear_config(x="e4m3", w="e4m3", g="e5m2", target="h200", fast_accum=True)
    assert str(fast).endswith("fprop on h200, fast accumulation, dgrad on h200, wgrad on h200")
    out = Quantizer(format=get_format("e5m2"), rounding=Rounding(mode="stochastic"))
    gemm = Gemm(target=get_unit("hopper.wgmma"), accumulate="fp16", plan=GemmPlan(), out=out)
    assert gemm.machine == "on hopper.wgmma, sums in fp16, own plan, rounded to e5m2 stochastic"
    assert (Gemm(out=out).machine, Gemm().machine) == ("rounded to e5m2 stochastic", "")


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Gemm(a="e4m3"), ArgumentError, r"a='e4m3' is not a Quantizer"),
        (lambda: LinearConfig(wgrad=Quantizer()), ArgumentError, r"wgrad=.* is not a Gemm"),
        (lambda: LinearConfig(casts_weight=1), ArgumentError, "casts_weight=1 is not a bool; pass True or False"),
        (lambda: LinearConfig(bias_after_rounding=0), ArgumentError, "bias_after_rounding=0 is not a bool; pass True"),
        (lambda: linear_config(x="e4m33", w=None, g=None), FormatError, r"e4m3"),
        (
            lambda: linear_config(x=None, w=None, g=None, grad_rounding="stochasti"),
            FormatError,
            r"did you mean 'stochastic'",
        ),
    ],
)
def test_wrong_fields_are_named(build, error, message):
    refused(message, build, error=error)


def q(name):
    return Quantizer(format=get_format(name) if isinstance(name, str) else name)


def config(fmt, other=None, **machine):
    return linear_config(x=fmt, w=other or fmt, g=fmt, **machine)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: config("e4m3", target="hoper.wgmma"), ArgumentError, r"unknown target 'hoper.wgmma'; did you mean"),
        (lambda: config(None, target="hoper.wgmma"), ArgumentError, r"unknown target 'hoper.wgmma'; did you mean"),
        (lambda: config("e4m3", target="h2000"), ArgumentError, r"unknown target 'h2000'; did you mean 'h200'"),
        (lambda: config("e4m3", target="/none.json"), ArgumentError, "cannot read /none.json: No such file"),
        (lambda: config("e4m3", target="recipe"), ArgumentError, r"Gemm has no recipe whose target"),
        (lambda: Gemm(plan=GemmPlan()), ArgumentError, r"plan= and accumulate= belong to a target"),
        (lambda: Gemm(accumulate="fp16"), ArgumentError, r"belong to a target; pass target= as well"),
        (lambda: Gemm(target="exact", plan="serial"), ArgumentError, "Gemm plan='serial' is not allowed; pass a Gemm"),
        (lambda: Gemm(target="exact", accumulate="bf16"), ArgumentError, r"accumulate='bf16' is not possible"),
        (lambda: Gemm(a=q("bf16"), b=q("bf16"), target="hopper.wgmma", accumulate="fp16"), ArgumentError,
         r"unit hopper.wgmma does not take bf16 x bf16 -> fp16"),
        (lambda: config("int8", target="volta.mma"), ArgumentError,
         r"does not take int8_full x int8_full; .* units that do: .*int8"),
        (lambda: config("int8", "e4m3", target="exact"), FormatError, r"int8 by e4m3: integers and floating point"),
        (lambda: config("uint8", target="h200"), FormatError, r"no unit multiplies uint8; pass target=Datapath"),
        (lambda: config("mxint8", target="b200"), FormatError, r"no unit multiplies mxint8"),
        (lambda: config("int8_channel", target="exact"), ArgumentError, r"exact does not take int8_full x int8_full"),
        (lambda: config(scaled(get_format("int8"), (1, 32)), target="h200"), FormatError, r"int8 in blocks of \(1, 32"),
        (lambda: config(scaled(get_format("e4m3"), (1, 32)), target="exact"), FormatError, r"e4m3 in blocks of \(1, 3"),
        (lambda: config("mxfp8_e4m3", target="h200"), ArgumentError, r"target h200 has no unit for e4m3 x e4m3"),
        (lambda: config("e2m3", target="h200"), ArgumentError, r"target h200 has no unit for e2m3"),
        (lambda: config("mxfp8_e4m3", target="hopper.wgmma"), ArgumentError,
         r"does not take e4m3 x e4m3 with e8m0 scales; .*units that do: blackwell.tcgen05.mxf8f6f4"),
        (lambda: config("mxfp4", target="blackwell.tcgen05.nvf4"), FormatError,
         r"operands have e8m0 scales every 32 products, the unit has e8m0 scales every 16; choose another unit"),
        (lambda: config("nvfp4", target=Datapath()), FormatError, r"ue4m3 scales .* the unit has no scales of its own"),
        (lambda: config("mxfp4", "e4m3", target="exact"), FormatError, r"mx scales by one with no scales; give both"),
        (lambda: config("e3m4", target="hopper.wgmma"), ArgumentError, r"unit hopper.wgmma does not take e3m4 x e3m4"),
        (lambda: Gemm(target=3), ArgumentError, r"target=3 is neither a name"),
    ],
)  # fmt: skip
def test_configs_fail_before_the_first_step(build, error, message):
    refused(message, build, error=error)


X, W = normal(32, 48, seed=1), normal(64, 48, seed=2)


@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")
@pytest.mark.parametrize(
    ("made", "sizes", "error", "message"),
    [
        (config("e5m2", target="h200"), (32, 48, 64), DtypeError, r"cuBLAS does not multiply e5m2 by e5m2"),
        (config("nvfp4", target="chain", fast_accum=True), (32, 48, 64), ArgumentError, r"no use_fast_accum for 4-bit"),
        (config("e4m3_128x128", target="h200"), (32, 48, 64), FormatError, r"no 128x128 by 128x128 scales"),
        (config(None, target="hopper.wgmma"), (32, 48, 64), ArgumentError, r"hopper.wgmma does not take fp32 x fp32"),
        (LinearConfig(fprop=Gemm(a=q("e4m3"), b=q("e4m3"), target="h200", out=q("e5m2"))), (32, 48, 64), DtypeError,
         r"cuBLAS has no e5m2 output for e4m3 by e4m3"),
        (LinearConfig(fprop=Gemm(a=q("nvfp4"), b=q("nvfp4"), target="blackwell.tcgen05.nvf4",
                                 plan=GemmPlan(promote_every=8))), (32, 48, 64), ArgumentError,
         r"promote_every=8 cuts the unit's scale blocks of 16"),
    ],
)  # fmt: skip
def test_products_that_a_machine_does_not_take_are_named(made, sizes, error, message):
    t, k, n = sizes
    refused(message, EmulatedGEMM.apply, X[:t, :k], W[:n, :k], None, made, error=error)


def test_generators_are_checked_where_the_unit_draws():
    made = config("bf16", target=Datapath(rounding="stochastic"))
    refused(r"generator='seed' is not a seed", EmulatedGEMM.apply, X, W, None, made, "seed")
    y = EmulatedGEMM.apply(X, W, None, config("bf16", target="hopper.wgmma"), 3)  # one that does not draw needs none
    assert torch.equal(y, EmulatedGEMM.apply(X, W, None, config("bf16", target="hopper.wgmma")))


def test_linear_config_takes_dtypes_and_refuses_what_is_no_format():
    config = linear_config(x=torch.float8_e4m3fn, w=None, g="e5m2", scaling=None)
    assert config == linear_config(x="e4m3", w=None, g="e5m2", scaling=None)
    for scaling in (None, "none", "mx"):
        with pytest.raises(FormatError, match="format=8 is not a name, a format record or a dtype"):
            linear_config(x=8, w=None, g=None, scaling=scaling)
