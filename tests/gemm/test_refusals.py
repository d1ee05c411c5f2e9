# SPDX-License-Identifier: Apache-2.0
"""What mm, bmm, linear, int_mm, scaled_mm and mma refuse, and in which words."""

import numpy
import pytest
import torch
from torch.nn.functional import ScalingType

from fmtsim import Datapath, GemmPlan, bmm, encode, get_format, get_unit, int_mm, linear, mm, mma, quantize, scaled_mm
from fmtsim.gemm.products.operator import run_gemm
from fmtsim.gemm.targets.target import find_target
from fmtsim.spec.call import Operands
from fmtsim.spec.gemm_spec import GemmSpec
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError, FormatError
from tests.support.gemm_oracle import sums
from tests.support.operands import e4m3_pair
from tests.support.refusals import refused

WGMMA = "hopper.wgmma"
STOCHASTIC = Datapath(accumulator="bf16", rounding="stochastic")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
A, B = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
FP8, EIGHTS = torch.ones(4, 8).to(E4M3), torch.ones(16, 16).to(E4M3)
INT, ONE = torch.ones(4, 8, dtype=torch.int8), torch.tensor(1.0)
# Operands of scaled_mm, its bias and its scales.
P, PT = (x if i == 0 else x.t() for i, x in enumerate(e4m3_pair(16, 16, 32)))
HALF, BRAIN = torch.ones(16).half(), torch.ones(16).bfloat16()
MX = torch.full((16, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
PACKED = torch.zeros(16, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
NV = torch.ones(16, 2).to(E4M3)
WIDE_A, E5 = torch.ones(16, 24).to(E4M3), torch.ones(16, 32).to(E5M2)


def scaled(*arguments, **options):
    """Call scaled_mm on Hopper's unit, with a bfloat16 result, unless the options say otherwise."""
    rest = {"target": WGMMA, "out_dtype": torch.bfloat16}
    return lambda: scaled_mm(*arguments, **(options if options.get("target") == "x" else rest | options))


REFUSED = {
    TypeError: [
        (lambda: bmm(A, B, unit=WGMMA), r"bmm\(\) got an unexpected .* 'unit'; write target= \(it takes a, b, out"),
        (lambda: linear(A, A, target=WGMMA, target_="x"), "'target_'; did you mean 'target'"),
        (lambda: mm(A, B, dtype=torch.float32), r"mm\(\) got an .* 'dtype'; write out_dtype= \(it takes a, b, "),
    ],
    ArgumentError: [
        (lambda: mm(A, B),
         r"mm needs target=: a GPU with its library .*'h200'.*matrix unit alone .*datapath .* or its JSON"),
        (lambda: mm(A, B, target="recipe"), "mm has no recipe whose target"),
        (lambda: mm(torch.nested.nested_tensor([A[0].float()] * 2, layout=torch.jagged), B, target=WGMMA),
         "a is a nested tensor; pass its parts one by one"),
        (lambda: mm(A[0], B, target=WGMMA), r"mm: a has shape \(8,\); pass a and b of shape \[M, K\] and \[K, N\]$"),
        (lambda: mm(A[None], B, target=WGMMA),
         r"mm: a has shape \(1, 4, 8\); pass .* of shape \[M, K\] and \[K, N\]; fmtsim.bmm multiplies two stacks"),
        (lambda: bmm(A, B, target=WGMMA),
         r"bmm: a has shape \(4, 8\); pass a and b of shape \[B, M, K\] and \[B, K, N\]; fmtsim.mm multiplies two"),
        (lambda: linear(A[0, 0], A, target=WGMMA), "pass a tensor of 1 dimensions or more"),
        (lambda: mm(A, A, target=WGMMA), r"mm: a of shape \(4, 8\) and b .* but K is 8 and 4"),
        (lambda: bmm(A.expand(2, 4, 8), B.expand(3, 8, 4), target=WGMMA), "differ in their batch"),
        (lambda: linear(A, B, target=WGMMA), r"x of shape \(4, 8\) does not fit w of shape"),
        (lambda: mm(A, B, target="hoper.wgmma"),
         r"unknown target 'hoper.wgmma'; did you mean 'hopper.wgmma' .* \(choose a GPU with its library \(a100, .*"),
        (lambda: mm(A, B, target=3),
         "target=3 is neither a name, nor a path, nor a record; choose a GPU with its library .* a matrix unit .* "),
        (lambda: mm(A, B, target='{"kind": "plan"}'), "target: kind='plan' is not the kind of a datapath"),
        (lambda: mm(A, B, target="{"), "target='{': Expecting property name"),
        (lambda: mma(A, B.mT, target="h200"),
         "mma is one instruction of a matrix unit, and target='h200' is a GPU with its library; choose a unit .volta"),
        (lambda: mm(A, B.half(), target=WGMMA), "hopper.wgmma does not take bf16 x fp16"),
        (lambda: mm(A.float(), B.float(), target=WGMMA),
         "unit hopper.wgmma multiplies TF32, not float32; pass allow='tf32'"),
        (lambda: mm(A, B, target=WGMMA, formats=("e4m3",)),
         r"formats=\('e4m3',\) is not a pair; pass one value for both operands, or \(a's, b's\)"),
        (lambda: mm(A, B, target=WGMMA, allow="tf16"),
         "allow='tf16' is not possible; choose 'tf32', 'fp16_accumulation', or both as a tuple"),
        (lambda: mm(A, B, target=WGMMA, allow=("tf32", 0)), r"allow=\('tf32', 0\) is not possible"),
        (lambda: mm(A, B, target=WGMMA, plan="chain"), "plan='chain' is not an accumulation order"),
        (lambda: mm(A, B, target=WGMMA, accumulate="bf16"),
         "accumulate='bf16' is not possible; choose one of fp32, fp16, fp64, int32"),
        (lambda: mm(A, B, target=Datapath(), accumulate="fp16"),
         "accumulate='fp16' is not what the datapath sums in; leave it out"),
        (lambda: mm(A, B, target=WGMMA, accumulate="fp32", allow="fp16_accumulation"),
         "accumulate='fp32' contradicts allow='fp16_accumulation'"),
        (lambda: mm(A.half(), B.half(), target=WGMMA, out_dtype=torch.float32, allow="fp16_accumulation"),
         "allow='fp16_accumulation' with out_dtype=torch.float32 is not a product that cuBLAS has"),
        (lambda: mm(A, B, target=WGMMA, generator=1), "generator= is for units that round"),
        (lambda: mm(A, B, target=STOCHASTIC, generator="x"), "generator='x' is not a seed"),
        (lambda: linear(A, A, A[0], target=WGMMA), r"bias of shape \(8,\) does not fit w .*\[4\]"),
        (lambda: mm(A * 0.3, B, target=WGMMA, formats="e4m3"),
         "a holds 0.300781, which is not a value of e4m3; round it first"),
        (lambda: mma(FP8, A.float() * 0.3, target=WGMMA, formats=(None, "e4m3")),
         "b holds 0.3, which is not a value of e4m3; round it first"),
        (lambda: mma(A * 0.3, FP8.view(torch.uint8), target=WGMMA, formats="e4m3"),
         "a holds 0.300781, which is not a value"),
        (lambda: mm(A * 0.3, FP8.view(torch.uint8).mT, target=WGMMA, formats="e4m3"),
         "a holds 0.300781, which is not a value"),
        (lambda: mma(A.float(), A.double() * 0.1, target=WGMMA, formats="tf32"),
         "b holds 0.1, which is not a value"),
        (lambda: mm(A, B, target=Datapath(promote_every=16), plan=GemmPlan(promote_every=32)),
         "the unit promotes every 16 products, the plan every 32"),
        (lambda: mm(A, B, target=WGMMA, plan=GemmPlan(promote_every=128, scaled_promotion=True)),
         "a plan with scaled_promotion=True does not fit scaling 'none'"),
        (lambda: mm(INT, INT.mT, target="int8", plan=GemmPlan(partial="bf16")),
         "integer sums have neither scaled_promotion nor partial"),
        (lambda: mm(torch.ones(4, 64), torch.ones(64, 4), target="blackwell.tcgen05.nvf4", formats="e2m1",
            plan=GemmPlan(k_tile=24)),
         "k_tile=24 cuts the unit's scale blocks of 16 products; choose a multiple"),
        (lambda: mm(torch.ones(4, 64), torch.ones(64, 4), target="blackwell.tcgen05.nvf4", formats="e2m1",
            plan=GemmPlan(k_tile=64, lanes=8)),
         "lanes=8 of k_tile=64 cut the unit's scale blocks of 16 products; choose whole blocks"),
        (lambda: mm(torch.ones(4, 40), torch.ones(40, 4), target="blackwell.tcgen05.nvf4", formats="e2m1",
            plan=GemmPlan(k_tile=32, residue_first=True)),
         "residue_first with K=40 cuts the unit's scale blocks of 16; pad K"),
        (lambda: int_mm(INT, INT), "int_mm: a of shape .* but K is 8 and 4"),
        (lambda: int_mm(INT, INT.mT, target="h200"),
         "torch._int_mm on CUDA takes M above 16 .* not M=4, K=8, N=4; pad the operands"),
        (lambda: mma(A, B, target=WGMMA), r"mma: a of shape \(4, 8\) and b .* differ in K"),
        (lambda: mma(A, A, torch.ones(4, 5), target=WGMMA), r"c has shape \(4, 5\); pass \[..., 4, 4\]"),
        (lambda: mma(A, A, torch.ones(4, 4).half(), target=WGMMA), "does not take bf16 x bf16 -> fp16"),
        (lambda: mma(A, A, torch.full((4, 4), 1.001), target=Datapath(accumulator="bf16")),
         "c holds numbers that the accumulator bf16 lacks; round it first"),
        (lambda: mma(A.expand(2, 4, 8), A.expand(3, 4, 8), target=WGMMA),
         r"mma: leading dimensions \(2,\), \(3,\) do not broadcast"),
        (lambda: mma(A, A, target=WGMMA, scale_a=torch.ones(4, 1)),
         "the unit has no scales of its own; leave scale_a and scale_b out, or call scaled_mm"),
        (lambda: mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4", scale_a=torch.ones(4, 2)),
         r"scale_a has shape \(4, 2\); pass \[..., 4, 1\], a scale for every 32 products"),
        (lambda: mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4", scale_a=torch.full((4, 1), 3.0)),
         "scale_a holds 3, which is not a value of e8m0; round it first"),
        (lambda: mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4", scale_a=FP8[:, :1]),
         "blackwell.tcgen05.mxf8f6f4 does not take e4m3 x e4m3 with ue4m3 scales"),
        (lambda: scaled_mm(P, PT, ONE, ONE), "scaled_mm needs target=: a GPU with its library"),
        (scaled(P[0], PT, ONE, ONE), r"a has shape \(32,\); pass a tensor of 2 dimensions"),
        (scaled(P, P, ONE, ONE), r"a of shape \(16, 32\) and b of shape \(16, 32\) do not fit"),
        (scaled(P, PT.to(torch.bfloat16), ONE, ONE), "unit hopper.wgmma does not take e4m3 x bf16"),
        (scaled(P, PT, torch.ones(16), torch.ones(16)),
         r"scale_a of shape \(16,\) and scale_b of shape \(16,\) fit no kind of scaling; pass one element"),
        (scaled(P, PT, ONE * torch.nan, ONE), "scale_a holds nan; scales are finite and not negative"),
        (scaled(P, PT, ONE, ONE * torch.inf), "scale_b holds inf; scales are finite"),
        (scaled(P, PT, torch.ones(16, 1), -torch.ones(1, 16)), "scale_b holds -1; scales are finite"),
        (scaled(P, PT, ONE, ONE, scale_recipes=("RowWise", None)), "scale_recipes of a and b belong"),
        (scaled(P, PT, ONE, ONE, scale_recipes="Row"),
         "scale_recipes='Row' is not a ScalingType; choose one of TensorWise, RowWise"),
        (scaled(P, PT, MX, MX, swizzles=("32", None)), "swizzles='32' is not a SwizzleType"),
        (scaled(P, PT, ONE, torch.ones(1, 16), scale_recipes=("TensorWise", "RowWise")),
         "scaling TensorWise x RowWise does not exist"),
        (scaled(P, PT, ONE[None, None], ONE[None, None], scale_recipes="BlockWise128x128"),
         "scaling BlockWise128x128 x BlockWise128x128"),
        (scaled(P, PT, torch.ones(2), ONE, scale_recipes="TensorWise"),
         r"scale_a has shape \(2,\); a tensor-wise scale has one element"),
        (scaled(P, PT, torch.ones(16, 1), torch.ones(16, 1), scale_recipes="RowWise"),
         r"scale_b has shape \(16, 1\); row-wise scales have shape \(1, 16\)"),
        (scaled(P, PT, torch.ones(15, 1), ONE[None, None], scale_recipes=("BlockWise1x128", "BlockWise128x128")),
         r"scale_a has shape \(15, 1\); BlockWise1x128 scales have shape \(16, 1\) or \(1, 16\)"),
        (scaled(P, PT, MX, MX), r"scale_a has 16 elements; pass 512: \[16, 1\] padded to"),
        (scaled(P, PT, MX[:5], MX, swizzles=("NO_SWIZZLE", None)), r"without swizzle pass \(16, 1\)"),
        (scaled(P, PT, MX, MX, swizzles="NO_SWIZZLE"),
         "unit hopper.wgmma does not take e4m3 x e4m3 with e8m0 scales"),
        (scaled(P, PT, [MX, ONE], [MX, ONE], swizzles="NO_SWIZZLE"),
         "scale_a is a list of 2; BlockWise1x32 takes fewer scales"),
        (scaled(P, PT, [MX, ONE], [MX, ONE], scale_recipes=["BlockWise1x32", "RowWise"], swizzles="NO_SWIZZLE"),
         r"scale_a comes with \('RowWise',\); the second scale is TensorWise"),
        (scaled(PACKED, PACKED.t(), [NV, ONE, ONE], [NV, ONE, ONE], target="blackwell.tcgen05.nvf4",
            swizzles="NO_SWIZZLE"),
         "scale_a is a list of 3; BlockWise1x16 takes fewer scales"),
        (scaled(PACKED, PACKED.t(), [NV, torch.ones(2)], [NV, ONE], target="blackwell.tcgen05.nvf4",
            swizzles="NO_SWIZZLE"),
         r"scale_a has shape \(2,\); a tensor-wise scale has one element"),
        (scaled(PACKED, PACKED.t(), [NV], [NV, ONE], target="blackwell.tcgen05.nvf4", swizzles="NO_SWIZZLE"),
         "scale_a and scale_b belong together; pass a tensor scale for both or for none"),
        (scaled(P, PT, ONE, ONE, scale_recipes=[]), r"scale_recipes=\[\] is not a ScalingType"),
        (scaled(P, PT, ONE, ONE, None, ONE.double()),
         r"scale_result is torch.float64 of shape \(\); pass one float32 element"),
        (scaled(P, PT, ONE, [ONE, ONE.to("meta")]), r"a is on cpu, scale_b\[1\] on meta"),
        (scaled(P.float().requires_grad_(), PT, ONE, ONE, formats=("e4m3", None)), "but a requires one; pass a.detach"),
        (scaled(P, PT.float().requires_grad_(), ONE, ONE, formats=(None, "e4m3")), "but b requires one; pass b.detach"),
        (scaled(P, PT, ONE, ONE, BRAIN[:5]), r"bias has shape \(5,\); pass \[16\]"),
        (scaled(P, PT, ONE, ONE, BRAIN.clone().requires_grad_()),
         "scaled_mm has no gradient, but bias requires one; pass bias.detach()"),
        (scaled(P, PT, ONE, ONE, plan=GemmPlan(promote_every=128, scaled_promotion=True)),
         "a plan with scaled_promotion=True does not fit scaling 'tensor'"),
        (scaled(P, PT, torch.ones(16, 1), ONE[None, None], plan=GemmPlan(promote_every=64, scaled_promotion=True),
            scale_recipes=("BlockWise1x128", "BlockWise128x128")),
         "promote_every=64 does not fit scales of 128 products; choose 128"),
        (scaled(P, PT, torch.ones(16, 1), ONE[None, None], scale_recipes=("BlockWise1x128", "BlockWise128x128"),
            plan=GemmPlan(promote_every=128, scaled_promotion=True, k_tile=64)),
         "k_tile=64 does not hold whole chains of 128 products"),
        (lambda: mm(torch.ones(4, 8, dtype=torch.int8), torch.ones(8, 4, dtype=torch.int8), target="int8",
            plan=GemmPlan(reduce="in_place")),
         "integer sums have neither scaled_promotion nor partial nor reduce='in_place'"),
        (lambda: sums(torch.ones(1, 8, dtype=torch.int8), torch.ones(1, 8, dtype=torch.int8),
            GemmSpec(datapath=get_unit("int8").mode("int8", "int8"), plan=GemmPlan(reduce="in_place"),
            a=get_format("int8"), b=get_format("int8"))),
         "nor reduce='in_place'; leave them out of the plan"),
        (lambda: scaled_mm(EIGHTS, EIGHTS.t(), torch.ones(1), torch.ones(1), out_dtype=torch.bfloat16,
            target="hopper.wgmma", plan=GemmPlan(reduce="in_place")),
         "reduce='in_place' adds parts to outputs that have no scales, and the scaling is 'tensor'"),
        (lambda: run_gemm(Operands(torch.ones(1, 4), torch.ones(1, 4), torch.ones(1), c=torch.ones(1, 1)),
            GemmSpec(datapath=get_unit("fp32_fma").mode("fp32", "fp32"), plan=GemmPlan(reduce="in_place"),
            a=get_format("fp32"), b=get_format("fp32"))),
         "parts that are added in place begin with c or with a bias, and both are given; pass one"),
    ],
    DtypeError: [
        (lambda: mm(A, numpy.ones((8, 4)), target=WGMMA), "b is ndarray, not a tensor"),
        (lambda: mm(A.int(), B.int(), target=WGMMA), "a has dtype torch.int32; pass one of float16"),
        (lambda: mm(A.to(torch.complex64), B, target=WGMMA), "a has dtype torch.complex64"),
        (lambda: mm(A, B, target=WGMMA, out_dtype=torch.int8), "out_dtype=torch.int8 is not the dtype"),
        (lambda: mm(A, B, target=WGMMA, out_dtype="float32"), "out_dtype='float32' is not a dtype"),
        (lambda: mm(INT, INT.mT, target="int8", out_dtype=torch.float32),
         "out_dtype=torch.float32 is not what integers sum to; choose torch.int32"),
        (lambda: mm(A, B, target=WGMMA, out_dtype=torch.int32), "out_dtype=torch.int32 is not the dtype of a product"),
        (lambda: linear(A, A, INT[:, 0], target=WGMMA), "bias has dtype torch.int8; pass float16"),
        (lambda: mm(FP8, FP8.mT, target=WGMMA, formats=("e5m2", None)),
         "a has dtype torch.float8_e4m3fn, which is not e5m2; leave formats= out"),
        (lambda: mm(INT, INT.mT, target=WGMMA, formats=("e4m3", None)), r"pass codes of e4m3 as a.view\(torch.uint8\)"),
        (lambda: mm(A, B, target="int8", formats="int8"),
         "a has dtype torch.bfloat16; pass int8 as a torch.int8 tensor"),
        (lambda: int_mm(A, B), "int_mm: a has dtype torch.bfloat16; pass torch.int8"),
        (lambda: mma(A, A, A[:, :4], target=WGMMA), "c has dtype torch.bfloat16; pass one of float32"),
        (lambda: mma(A, A, torch.ones(4, 4).half(), target=WGMMA, accumulate="fp32"),
         "c has dtype torch.float16, but accumulate='fp32'; leave one of them out"),
        (lambda: mma(A, A, torch.ones(4, 4).half(), target=Datapath()),
         "c has dtype torch.float16, but the unit sums in torch.float32"),
        (lambda: mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4", scale_a=INT[:, :1]),
         "scale_a has dtype torch.int8; pass e8m0 codes as torch.uint8, or floats"),
        (scaled(P, PT, ONE, ScalingType.TensorWise, ONE, ScalingType.TensorWise), "recipes as scale_recipes="),
        (scaled(P, PT, ONE.double(), ONE), "scale_a has dtype torch.float64; pass torch.float32"),
        (scaled(P, PT, ONE, ONE, scale_recipes="BlockWise1x32"),
         "scale_a has dtype torch.float32; BlockWise1x32 scales are torch.float8_e8m0fnu"),
        (scaled(P, PT, MX, P[:, :1]), "scale_a and scale_b have different dtypes"),
        (scaled(P, PT, ONE, ONE, out_dtype="bf16"), "out_dtype='bf16' is not the dtype of a product"),
        (scaled(P, PT, ONE, ONE, HALF), "bias has dtype torch.float16; a torch.bfloat16 output takes torch.bfloat16"),
        (scaled(P, PT, ONE, ONE, HALF.float(), out_dtype=E4M3), "takes torch.bfloat16 or torch.float16"),
        (scaled(P, PT, ONE, ONE, out_dtype=torch.float4_e2m1fn_x2), "is not the dtype of a product"),
    ],
    FormatError: [
        (lambda: mm(INT, INT.mT, target=Datapath()), "Datapath does not multiply"),
        (lambda: mm(A, B, target=WGMMA, formats=("e9m9x", None)), "e9m9x"),
        (lambda: mm(A, B, target="exact", formats=("mxfp4", None)),
         "formats= of a, 'mxfp4', is not a plain number format"),
    ],
}  # fmt: skip
LIBRARY = {  # what torch refuses, a target refuses
    ArgumentError: [
        (scaled(WIDE_A, WIDE_A.t(), ONE, ONE, target="x"), "multiples of 16, not K=24, N=16; pad, take another dtype"),
        (scaled(P, PT[:, :5], ONE, ONE, target="x"), "not K=32, N=5"),
        (scaled(PACKED, PACKED.t(), *[torch.zeros(512, dtype=torch.uint8).view(E4M3)] * 2, out_dtype=torch.bfloat16,
            use_fast_accum=True, target="x"),
         "no use_fast_accum for 4-bit operands; leave it False"),
    ],
    DtypeError: [
        (lambda: mm(A, B.half(), target="x"), "a has dtype torch.bfloat16, b torch.float16; torch"),
        (lambda: mm(FP8, FP8.mT, target="x"), "torch.mm does not take torch.float8_e4m3fn; call fmtsim.scaled_mm"),
        (lambda: mm(A, B, target="x", out_dtype=torch.float16),
         "torch.mm does not turn torch.bfloat16 into torch.float16; choose torch.bfloat16 or torch.float32"),
        (lambda: mm(A.float(), B.float(), target="x", out_dtype=torch.float64),
         "torch.mm does not turn torch.float32 into torch.float64; choose torch.float32, or name a unit"),
        (lambda: linear(A, A, A[0, :4].float(), target="x"), "bias has dtype torch.float32; pass torch.bfloat16"),
        (scaled(E5, E5.t(), ONE, ONE, target="x", out_dtype=torch.float32), "cuBLAS does not multiply e5m2 by e5m2"),
        (scaled(P, PT, ONE, ONE, target="x", out_dtype=E5M2), "cuBLAS has no e5m2 output for e4m3 by e4m3"),
        (scaled(P.bfloat16(), PT.bfloat16(), ONE, ONE, target="x", out_dtype=torch.float32),
         "torch._scaled_mm takes 8-bit and 4-bit operands, not bf16 x bf16; call mm"),
        (scaled(P, PT, ONE, ONE, BRAIN, out_dtype=torch.float32, target="x"),
         "torch._scaled_mm adds no bias to a float32 output"),
    ],
}  # fmt: skip


def rows(table):
    return [pytest.param(*row, error, id=f"{error.__name__} {i}") for error, rows in table.items()
            for i, row in enumerate(rows)]  # fmt: skip


@pytest.mark.parametrize(("call", "message", "error"), rows(REFUSED))
def test_refused(call, message, error):
    refused(message, call, error=error)


@pytest.mark.parametrize(("call", "message", "error"), rows(LIBRARY))
def test_what_torch_refuses_a_target_refuses(notebook, call, message, error):
    refused(message, call, error=error)


# What each verb takes, by the names of its tensors.
VERBS = {
    "mm": (mm, {"a": A, "b": B}),
    "bmm": (bmm, {"a": A[None], "b": B[None]}),
    "linear": (linear, {"x": A, "w": A, "bias": A[0, :4]}),
    "int_mm": (lambda target, **given: int_mm(**given), {"a": INT, "b": INT.mT}),
    "mma": (mma, {"a": A, "b": A, "c": torch.ones(4, 4)}),
    "mma scaled": (lambda target, **given: mma(target="blackwell.tcgen05.mxf8f6f4", **given),
                   {"a": FP8, "b": FP8, "scale_a": torch.ones(4, 1), "scale_b": torch.ones(4, 1)}),
    "scaled_mm": (scaled_mm, {"a": FP8, "b": FP8.mT, "scale_a": ONE, "scale_b": ONE, "bias": A[0, :4].half(),
                                     "scale_result": ONE}),
}  # fmt: skip


@pytest.mark.parametrize(("verb", "name"), [(verb, name) for verb, (_, given) in VERBS.items() for name in given])
def test_every_tensor_is_looked_at(verb, name):
    call, given = VERBS[verb]
    call(target=WGMMA, **given)
    first, right = next(iter(given)), given[name]
    with pytest.raises(DtypeError, match=f"^{name} is (list|float), not a tensor"):
        call(target=WGMMA, **given | {name: right.tolist() if right.dim() else [1.0]})
    with pytest.raises(ArgumentError, match=rf"{first} is on (cpu, {name} on meta|meta, \w+ on cpu); move them to one"):
        call(target=WGMMA, **given | {name: right.to("meta")})
    with pytest.raises(FmtsimError, match=rf"{name}.* has (shape|layout|dtype)|{name} of shape|scale_result is"):
        call(target=WGMMA, **given | {name: torch.stack([right, right], -1)[..., None, None]})
    if not name.startswith("scale"):
        with pytest.raises(ArgumentError, match=f"{name} has layout torch.sparse_coo; pass a dense tensor"):
            call(target=WGMMA, **given | {name: right.float().to_sparse()})


def test_an_unknown_target_or_unit_is_reported_first():
    words = torch.ones(3, 4, dtype=torch.int32)
    for verb in (mm, bmm, linear, int_mm):
        with pytest.raises(ArgumentError, match="^unknown target 'h300'; did you mean 'h200' or 'h100'"):
            verb(words, torch.ones(5, 2, 3), target="h300")
        with pytest.raises(ArgumentError, match="^unknown target 'hopper.mmma'; did you mean 'hopper.mma'"):
            verb(words, torch.ones(5, 2, 3), target="hopper.mmma")


def test_gpus_without_a_record_have_a_sibling():
    for name, sibling in (("GH200", "h200"), ("H100-PCIe", "h100"), ("rtx 4090", "l40s"), ("v100", "volta.mma")):
        with pytest.raises(
            ArgumentError, match=f"^no library on a GPU named '{name}' is recorded; '{sibling}' has its"
        ):
            mm(torch.ones(2, 2), torch.ones(2, 2), target=name)
        find_target(sibling)


def test_lengths_count_numbers_not_bytes():
    """A float4 tensor has two numbers in a byte: as many bytes as x has numbers is twice too long, and read past it."""
    fp4 = torch.zeros(8, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    refused("does not fit w of shape", linear, A, fp4, target="exact")
    y = linear(A, fp4[:, :4], target="exact")
    assert y.shape == (4, 8) and not y.any()


def test_mma_reads_the_negative_bit_of_truncated_operands():
    negated = torch._neg_view(torch.full((1, 8), 1 + 2.0**-20))
    sums = mma(negated, torch.ones(1, 8), target=WGMMA)
    assert torch.equal(sums, mma(negated.clone(), torch.ones(1, 8), target=WGMMA)) and sums.item() == -8


def test_what_equals_a_flag_is_refused_after_a_call_with_the_flag():
    a = torch.ones(2, 2, dtype=torch.bfloat16)
    mm(a, a, target="hopper.wgmma", strict=False)
    refused("strict=0 is not a flag", mm, a, a, target="hopper.wgmma", strict=0)


def test_scaled_mm_names_an_unknown_keyword():
    with pytest.raises(TypeError, match=r"scaled_mm\(\) got an unexpected keyword argument 'scale_recipe_a'"):
        scaled_mm(P, PT, ONE, ONE, target=WGMMA, scale_recipe_a="RowWise")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool])
def test_integers_are_no_operands_of_mm(dtype):
    """As of quantize and encode: they are refused, with what to do; nothing is converted silently."""
    x = torch.ones(4, 4).to(dtype)
    said = rf"torch.mm does not take {dtype}; convert it with .float\(\), or multiply int8 by fmtsim.int_mm"
    with pytest.raises(DtypeError, match=said):
        mm(x, x, target="h200")
    way = r".double\(\), which is exact below 2\*\*53" if dtype == torch.int64 else r".float\(\)"
    for verb in (encode, quantize):
        with pytest.raises(DtypeError, match=rf"x has dtype {dtype}; choose .* \(convert it with {way}\)"):
            verb(x, "e4m3")
