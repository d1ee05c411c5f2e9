"""Which scalings a block format has, and which only a quantiser has."""

import re

import pytest

from fmtsim.errors import FormatError
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.scaling import Scaling, TensorScale, block_scaling
from fmtsim.spec.quantizer import Quantizer

E4M3 = get_format("e4m3")
SCALINGS = {  # what a block format cannot have, and what is said about it
    "not one": ("e4m3", (1, 32), "scaling=(1, 32) is not a Scaling; choose Scaling(block"),
    "a quantizer's": ("e4m3", Scaling(statistic="std"), "scaling=[std of allxall] is none of a format; choose "),
    "arithmetic": ("e4m3", Scaling(arithmetic="double"), "arithmetic='double' is unknown; choose divide, reciprocal, "),
    "even": ("nf4", block_scaling((1, 32), "even"), "scale_rule='even' needs mantissa bits; choose floor or amax"),
    "narrow": ("e4m3", block_scaling((1, 32), "floor", scale=E4M3),
               "scale_rule='floor' needs a scale with 8 exponent bits, not e4m3; choose scale_rule='amax'"),
    "no mantissa": ("e4m3", Scaling(scale=get_format("e8m0")), "scale_rule='amax' needs a scale with mantissa bits"),
    "wide": ("e4m3", Scaling(scale=get_format("tf32")), "scale format tf32 is not supported; choose fp32, bf16, fp16"),
    "no NaN": ("e4m3", Scaling(scale=get_format("e2m1")), "scale format e2m1 has no NaN, which marks blocks"),
    "two levels": ("e2m1", Scaling(scale=E4M3, tensor=TensorScale(order="torchao")), "a tensor scale stands alone; "),
    "zero point": ("int4", Scaling(zero_point=True), "zero_point=True does not fit; choose an unsigned integer "),
}  # fmt: skip


@pytest.mark.parametrize("case", SCALINGS)
def test_scalings_that_no_block_format_has(case):
    element, scaling, message = SCALINGS[case]
    with pytest.raises(FormatError, match="^" + re.escape(f"format 'b': {message}")):
        BlockFormat(name="b", element=get_format(element), scaling=scaling)


@pytest.mark.parametrize("scaling", [block_scaling((1, 32), "floor"), Scaling(zero_point=True)])
def test_scalings_that_no_quantizer_has(scaling):
    with pytest.raises(FormatError, match=r"is that of a block format; pass BlockFormat\(element=, scaling=\)$"):
        Quantizer(format=E4M3, scaling=scaling)
