# SPDX-License-Identifier: Apache-2.0
"""Products of block formats on Blackwell's units and libraries: those without a target, or refused."""

import pytest
import torch

import fmtsim
from fmtsim import EmulatedGEMM, Gemm, LinearConfig, Quantizer, get_format
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.scaling import Scaling
from fmtsim.support.errors import FmtsimError, FormatError
from tests.support.operands import normal

pytestmark = pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")  # a guess serves here
SHARED = ("e4m3_tensor", "e4m3_channel", "e5m2_channel", "e2m1_tensor", "e2m1_channel", "e4m3_1x128", "e4m3_128x128",
          "e4m3_1x128_pow2", "e4m3_128x128_pow2")  # fmt: skip
LISTED = [f.name for f in map(get_format, fmtsim.list_formats()) if isinstance(f, BlockFormat) and f.bits in (4, 6, 8)]
FORMATS = tuple(dict.fromkeys((*LISTED, *SHARED)))
PARTNERS = ("nvfp4", "nvfp4_row", "mxfp8_e4m3", "mxfp4", "e4m3_tensor", "e4m3_1x128")
TARGETS = {  # pairs that each accepts, or more
    "blackwell.mma": 13, "blackwell.tcgen05": 29, "rtx_blackwell.mma": 29, "blackwell.tcgen05.mxf8f6f4": 45,
    "blackwell.tcgen05.mxf4": 3, "blackwell.tcgen05.nvf4": 66, "b200": 116,
}  # fmt: skip


def operands():
    """Return x [M, K] and w [N, K] whose rows and windows of 64 columns have other magnitudes."""
    windows = torch.tensor([1.0, 0.25, 4.0, 0.5]).repeat_interleave(64)
    return tuple(
        normal(rows, 256, seed=seed) * windows * torch.logspace(-1, 1, rows)[:, None]
        for rows, seed in ((32, 1), (48, 2))
    )


def error(a, b, target):
    """Return the largest relative error of a row or column against the product without a target."""
    x, w = operands()
    quantizers = [fmt if isinstance(fmt, Quantizer) else Quantizer(fmt) for fmt in (a, b)]
    y, expected = (
        EmulatedGEMM.apply(x, w, None, LinearConfig(fprop=Gemm(a=quantizers[0], b=quantizers[1], target=machine)))
        for machine in (target, None)
    )
    off = [((y - expected).norm(dim=d) / expected.norm(dim=d).clamp(1e-9)).max().item() for d in (0, 1)]
    return max(off)


@pytest.mark.parametrize("target", TARGETS)
def test_every_accepted_pair_has_the_values_of_the_product_without_a_target(target):
    # the same values, summed in another order by units that keep 25 bits and more: 1e-6; a lost scale is 2 or more
    pairs = [(a, b) for a in FORMATS for b in (a, *PARTNERS)] + [(b, a) for a in FORMATS for b in PARTNERS]
    accepted = {}
    for a, b in dict.fromkeys(pairs):
        try:
            accepted[a, b] = error(a, b, target)
        except FmtsimError:
            continue
    assert {pair: off for pair, off in accepted.items() if not off < 1e-4} == {}
    assert len(accepted) >= TARGETS[target]


@pytest.mark.parametrize("target", ["b200", "blackwell.tcgen05.nvf4"])
def test_an_operand_without_a_scale_of_the_tensor_takes_one_that_has_it(target):
    bare = BlockFormat("bare", get_format("e2m1"), Scaling(block=(1, 16), scale="e4m3", arithmetic="divide"))
    for other in ("nvfp4", "nvfp4_row"):
        assert error(bare, other, target) < 1e-4
        assert error(other, bare, target) < 1e-4
    # a rule's multiplier likewise
    rule = Scaling(block=(1, 32), top=4.0, arithmetic="divide", power_of_two="floor", multiplier=4 / 3)
    if target == "b200":
        assert error("mxfp4", Quantizer("e2m1", scaling=rule), target) < 1e-4


@pytest.mark.parametrize("target", ["b200", "blackwell.tcgen05.nvf4"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nvfp4_1x64", "float32 scales of 1x64 inside the sums"),
        ("nvfp4_double_scale", "float32 scales of 1x128 inside the sums"),
        ("if4_mse", "blocks of two element formats"),
        ("if4_mae", "blocks of two element formats"),
    ],
)
def test_scales_and_elements_that_no_unit_multiplies_are_refused(name, why, target):
    for a, b in ((name, name), (name, "nvfp4"), ("nvfp4", name)):
        with pytest.raises(FormatError, match=f"no unit multiplies {name}, which has {why}; choose .* such as nvfp4"):
            Gemm(a=Quantizer(a), b=Quantizer(b), target=target)
    assert Gemm(a=Quantizer(name), b=Quantizer(name), target="b200", dequantized=True).library == "b200"


@pytest.mark.parametrize("name", ["e4m3_1x128", "e4m3_128x128", "e4m3_1x128_pow2"])
def test_scales_of_128_products_do_not_go_into_a_unit_with_scales_of_its_own(name):
    model = torch.nn.Sequential(torch.nn.Linear(128, 48))
    with pytest.raises(FormatError, match="scales every 128 products, the unit has e8m0 scales every 32"):
        fmtsim.convert(model, format=name, target="blackwell.tcgen05.mxf8f6f4")


@pytest.mark.parametrize(
    "recipe", ["nvfp4_row_scaled_fwd_high_precision_bwd", "nvfp4_row_scaled_fwd_mxfp8_bwd", "composer2"]
)
def test_recipes_with_scales_of_rows_run_on_their_own_machine(recipe):
    x, w = operands()
    results = []
    for machine in ({"target": "recipe"}, {}):
        model = torch.nn.Sequential()
        model.experts = torch.nn.Sequential(torch.nn.Linear(256, 48, bias=False))
        with torch.no_grad():
            model.experts[0].weight.copy_(w)
        fmtsim.convert(model, recipe=recipe, **machine)
        given = x.clone().requires_grad_()
        y = model(given)
        y.sum().backward()
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), y)
        results.append((y.detach(), given.grad, model.experts[0].weight.grad))
    # sums in another order
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() < 1e-4 * expected.norm()
