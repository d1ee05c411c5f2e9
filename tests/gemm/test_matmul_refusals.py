# SPDX-License-Identifier: Apache-2.0
"""What mm, bmm, linear, int_mm and mma refuse, and in which words."""

import numpy
import pytest
import torch

import fmtsim
from fmtsim import Datapath, GemmPlan
from fmtsim.support.errors import ArgumentError, DtypeError, FmtsimError, FormatError

WGMMA = "hopper.wgmma"
STOCHASTIC = Datapath(accumulator="bf16", rounding="stochastic")


A, B = torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 4, dtype=torch.bfloat16)
FP8 = torch.ones(4, 8).to(torch.float8_e4m3fn)
INT = torch.ones(4, 8, dtype=torch.int8)
REFUSED = {
    "no machine": (lambda: fmtsim.mm(A, B), ArgumentError,
        r"mm needs target=: a GPU with its library .*'h200'.*matrix unit alone .*datapath .* or its JSON"),
    "recipe": (lambda: fmtsim.mm(A, B, target="recipe"), ArgumentError, "mm has no recipe whose target"),
    "old keyword": (lambda: fmtsim.bmm(A, B, unit=WGMMA), ArgumentError, "bmm has no argument 'unit'; it takes out"),
    "no tensor": (lambda: fmtsim.mm([[1.0]], B, target=WGMMA), DtypeError,
        r"a is list, not a tensor; pass torch.tensor\(a\)"),
    "array": (lambda: fmtsim.mm(A, numpy.ones((8, 4)), target=WGMMA), DtypeError, "b is ndarray, not a tensor"),
    "sparse": (lambda: fmtsim.mm(A.float().to_sparse(), B, target=WGMMA), ArgumentError,
               "a has layout torch.sparse_coo; pass a dense tensor"),
    "nested": (lambda: fmtsim.mm(torch.nested.nested_tensor([A[0].float()] * 2, layout=torch.jagged), B, target=WGMMA),
               ArgumentError, "a is a nested tensor; pass its parts one by one"),
    "vector": (lambda: fmtsim.mm(A[0], B, target=WGMMA), ArgumentError,
        r"mm: a has shape \(8,\); pass a and b of shape \[M, K\] and \[K, N\]$"),
    "stack": (lambda: fmtsim.mm(A[None], B, target=WGMMA), ArgumentError,
        r"mm: a has shape \(1, 4, 8\); pass .* of shape \[M, K\] and \[K, N\]; fmtsim.bmm multiplies two stacks"),
    "matrices": (lambda: fmtsim.bmm(A, B, target=WGMMA), ArgumentError,
        r"bmm: a has shape \(4, 8\); pass a and b of shape \[B, M, K\] and \[B, K, N\]; fmtsim.mm multiplies two"),
    "scalar": (lambda: fmtsim.linear(A[0, 0], A, target=WGMMA), ArgumentError, "pass a tensor of 1 dimensions or more"),
    "K": (lambda: fmtsim.mm(A, A, target=WGMMA), ArgumentError, r"mm: a of shape \(4, 8\) and b .* but K is 8 and 4"),
    "batch": (lambda: fmtsim.bmm(A.expand(2, 4, 8), B.expand(3, 8, 4), target=WGMMA), ArgumentError,
        "differ in their batch"),
    "linear K": (lambda: fmtsim.linear(A, B, target=WGMMA), ArgumentError,
        r"x of shape \(4, 8\) does not fit w of shape"),
    "devices": (lambda: fmtsim.mm(A, B.to("meta"), target=WGMMA), ArgumentError,
        "a is on cpu, b on meta; move them to one"),
    "integers": (lambda: fmtsim.mm(A.int(), B.int(), target=WGMMA), DtypeError,
        "a has dtype torch.int32; pass one of float16"),
    "complex": (lambda: fmtsim.mm(A.to(torch.complex64), B, target=WGMMA), DtypeError, "a has dtype torch.complex64"),
    "unknown": (lambda: fmtsim.mm(A, B, target="hoper.wgmma"), ArgumentError,
        r"unknown target 'hoper.wgmma'; did you mean 'hopper.wgmma' .* \(choose a GPU with its library \(a100, .*vol"),
    "number": (lambda: fmtsim.mm(A, B, target=3), ArgumentError,
        "target=3 is neither a name, nor a path, nor a record; choose a GPU with its library .* a matrix unit .* or a"),
    "no kind": (lambda: fmtsim.mm(A, B, target='{"kind": "plan"}'), ArgumentError,
        "target: kind='plan' is not the kind of a datapath"),
    "no JSON": (lambda: fmtsim.mm(A, B, target="{"), ArgumentError, "target='{': Expecting property name"),
    "no unit": (lambda: fmtsim.mma(A, B.mT, target="h200"), ArgumentError,
        "mma is one instruction of a matrix unit, and target='h200' is a GPU with its library; choose a unit .volta"),
    "pair": (lambda: fmtsim.mm(A, B.half(), target=WGMMA), ArgumentError, "hopper.wgmma does not take bf16 x fp16"),
    "fp32": (lambda: fmtsim.mm(A.float(), B.float(), target=WGMMA), ArgumentError,
             "unit hopper.wgmma multiplies TF32, not float32; pass allow_tf32=True"),
    "integers on floats": (lambda: fmtsim.mm(INT, INT.mT, target=Datapath()), FormatError,
        "Datapath does not multiply"),
    "plan": (lambda: fmtsim.mm(A, B, target=WGMMA, plan="chain"), ArgumentError,
             "plan='chain' is not an accumulation order"),
    "accumulate": (lambda: fmtsim.mm(A, B, target=WGMMA, accumulate="bf16"), ArgumentError,
                   "accumulate='bf16' is not possible; choose one of fp32, fp16, fp64, int32"),
    "own accumulate": (lambda: fmtsim.mm(A, B, target=Datapath(), accumulate="fp16"), ArgumentError,
                       "accumulate='fp16' is not what the datapath sums in; leave it out"),
    "contradiction": (lambda: fmtsim.mm(A, B, target=WGMMA, accumulate="fp32", allow_fp16_accumulation=True),
        ArgumentError,
                      "accumulate='fp32' contradicts allow_fp16_accumulation=True"),
    "wide half": (lambda: fmtsim.mm(A.half(), B.half(), target=WGMMA, out_dtype=torch.float32,
                                    allow_fp16_accumulation=True),
                  ArgumentError,
                  "allow_fp16_accumulation with out_dtype=torch.float32 is not a product that cuBLAS has"),
    "out": (lambda: fmtsim.mm(A, B, target=WGMMA, out_dtype=torch.int8), DtypeError,
        "out_dtype=torch.int8 is not the dtype"),
    "out text": (lambda: fmtsim.mm(A, B, target=WGMMA, out_dtype="float32"), DtypeError,
        "out_dtype='float32' is not a dtype"),
    "integer sums": (lambda: fmtsim.mm(INT, INT.mT, target="int8", out_dtype=torch.float32), DtypeError,
                     "out_dtype=torch.float32 is not what integers sum to; choose torch.int32"),
    "float sums": (lambda: fmtsim.mm(A, B, target=WGMMA, out_dtype=torch.int32), DtypeError,
                   "out_dtype=torch.int32 is not the dtype of a product"),
    "generator": (lambda: fmtsim.mm(A, B, target=WGMMA, generator=1), ArgumentError,
        "generator= is for units that round"),
    "seed": (lambda: fmtsim.mm(A, B, target=STOCHASTIC, generator="x"), ArgumentError, "generator='x' is not a seed"),
    "keyword": (lambda: fmtsim.linear(A, A, target=WGMMA, target_="x"), ArgumentError,
        "linear has no argument 'target_'; it"),
    "bias shape": (lambda: fmtsim.linear(A, A, A[0], target=WGMMA), ArgumentError,
        r"bias of shape \(8,\) does not fit w .*\[4\]"),
    "bias dtype": (lambda: fmtsim.linear(A, A, INT[:, 0], target=WGMMA), DtypeError,
        "bias has dtype torch.int8; pass float16"),
    "format": (lambda: fmtsim.mm(A, B, target=WGMMA, a_format="e9m9x"), FormatError, "e9m9x"),
    "block format": (lambda: fmtsim.mm(A, B, target="exact", a_format="mxfp4"), FormatError,
                     "a_format='mxfp4' is not a plain number format"),
    "other format": (lambda: fmtsim.mm(FP8, FP8.mT, target=WGMMA, a_format="e5m2"), DtypeError,
                     "a has dtype torch.float8_e4m3fn, which is not e5m2; leave a_format out"),
    "signed codes": (lambda: fmtsim.mm(INT, INT.mT, target=WGMMA, a_format="e4m3"), DtypeError,
                     r"pass codes of e4m3 as a.view\(torch.uint8\)"),
    "float integers": (lambda: fmtsim.mm(A, B, target="int8", a_format="int8", b_format="int8"), DtypeError,
                       "a has dtype torch.bfloat16; pass int8 as a torch.int8 tensor"),
    "off the format": (lambda: fmtsim.mm(A * 0.3, B, target=WGMMA, a_format="e4m3", b_format="e4m3"), ArgumentError,
                       "a holds 0.300781, which is not a value of e4m3; round it first"),
    "mma off the format": (lambda: fmtsim.mma(FP8, A.float() * 0.3, target=WGMMA, b_format="e4m3"), ArgumentError,
                           "b holds 0.3, which is not a value of e4m3; round it first"),
    "mma codes beside": (lambda: fmtsim.mma(A * 0.3, FP8.view(torch.uint8), target=WGMMA, a_format="e4m3",
                                            b_format="e4m3"), ArgumentError, "a holds 0.300781, which is not a value"),
    "codes beside": (lambda: fmtsim.mm(A * 0.3, FP8.view(torch.uint8).mT, target=WGMMA, a_format="e4m3",
                                       b_format="e4m3"), ArgumentError, "a holds 0.300781, which is not a value"),
    "mma truncated beside": (lambda: fmtsim.mma(A.float(), A.double() * 0.1, target=WGMMA, b_format="tf32",
                                                a_format="tf32"), ArgumentError, "b holds 0.1, which is not a value"),
    "promotions": (lambda: fmtsim.mm(A, B, target=Datapath(promote_every=16), plan=GemmPlan(promote_every=32)),
                   ArgumentError, "the unit promotes every 16 products, the plan every 32"),
    "scaled promotion": (lambda: fmtsim.mm(A, B, target=WGMMA, plan=GemmPlan(promote_every=128, scaled_promotion=True)),
                         ArgumentError, "a plan with scaled_promotion=True does not fit scaling 'none'"),
    "integer plan": (lambda: fmtsim.mm(INT, INT.mT, target="int8", plan=GemmPlan(partial="bf16")), ArgumentError,
                     "integer sums have neither scaled_promotion nor partial"),
    "scale blocks": (lambda: fmtsim.mm(torch.ones(4, 64), torch.ones(64, 4), target="blackwell.tcgen05.nvf4",
        a_format="e2m1",
                                       b_format="e2m1", plan=GemmPlan(k_tile=24)), ArgumentError,
                     "k_tile=24 cuts the unit's scale blocks of 16 products; choose a multiple"),
    "scale blocks of lanes": (lambda: fmtsim.mm(torch.ones(4, 64), torch.ones(64, 4), target="blackwell.tcgen05.nvf4",
        a_format="e2m1",
                                                b_format="e2m1", plan=GemmPlan(k_tile=64, lanes=8)), ArgumentError,
                              "lanes=8 of k_tile=64 cut the unit's scale blocks of 16 products; choose whole blocks"),
    "residue": (lambda: fmtsim.mm(torch.ones(4, 40), torch.ones(40, 4), target="blackwell.tcgen05.nvf4",
        a_format="e2m1",
                                  b_format="e2m1", plan=GemmPlan(k_tile=32, residue_first=True)), ArgumentError,
                "residue_first with K=40 cuts the unit's scale blocks of 16; pad K"),
    "int_mm dtype": (lambda: fmtsim.int_mm(A, B), DtypeError, "int_mm: a has dtype torch.bfloat16; pass torch.int8"),
    "int_mm K": (lambda: fmtsim.int_mm(INT, INT), ArgumentError, "int_mm: a of shape .* but K is 8 and 4"),
    "int_mm shape": (lambda: fmtsim.int_mm(INT, INT.mT, target="h200"), ArgumentError,
                     "torch._int_mm on CUDA takes M above 16 .* not M=4, K=8, N=4; pad the operands"),
    "mma K": (lambda: fmtsim.mma(A, B, target=WGMMA), ArgumentError, r"mma: a of shape \(4, 8\) and b .* differ in K"),
    "mma c": (lambda: fmtsim.mma(A, A, torch.ones(4, 5), target=WGMMA), ArgumentError,
        r"c has shape \(4, 5\); pass \[..., 4, 4\]"),
    "mma c dtype": (lambda: fmtsim.mma(A, A, A[:, :4], target=WGMMA), DtypeError,
        "c has dtype torch.bfloat16; pass one of float32"),
    "mma c half": (lambda: fmtsim.mma(A, A, torch.ones(4, 4).half(), target=WGMMA), ArgumentError,
        "does not take bf16 x bf16 -> fp16"),
    "mma c and accumulate": (lambda: fmtsim.mma(A, A, torch.ones(4, 4).half(), target=WGMMA, accumulate="fp32"),
        DtypeError,
                             "c has dtype torch.float16, but accumulate='fp32'; leave one of them out"),
    "mma c of a datapath": (lambda: fmtsim.mma(A, A, torch.ones(4, 4).half(), target=Datapath()), DtypeError,
                            "c has dtype torch.float16, but the unit sums in torch.float32"),
    "mma c off the accumulator": (
        lambda: fmtsim.mma(A, A, torch.full((4, 4), 1.001), target=Datapath(accumulator="bf16")), ArgumentError,
        "c holds numbers that the accumulator bf16 lacks; round it first"),
    "mma batch": (lambda: fmtsim.mma(A.expand(2, 4, 8), A.expand(3, 4, 8), target=WGMMA), ArgumentError,
                  r"mma: leading dimensions \(2,\), \(3,\) do not broadcast"),
    "mma scales": (lambda: fmtsim.mma(A, A, target=WGMMA, scale_a=torch.ones(4, 1)), ArgumentError,
                   "the unit has no scales of its own; leave scale_a and scale_b out, or call scaled_mm"),
    "mma scale shape": (lambda: fmtsim.mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4", scale_a=torch.ones(4, 2)),
                        ArgumentError,
                        r"scale_a has shape \(4, 2\); pass \[..., 4, 1\], a scale for every 32 products"),
    "mma scale value": (lambda: fmtsim.mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4",
        scale_a=torch.full((4, 1), 3.0)),
                        ArgumentError, "scale_a holds 3, which is not a value of e8m0; round it first"),
    "mma scale dtype": (lambda: fmtsim.mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4", scale_a=INT[:, :1]),
                        DtypeError,
                        "scale_a has dtype torch.int8; pass e8m0 codes as torch.uint8, or floats"),
    "mma scale format": (lambda: fmtsim.mma(FP8, FP8, target="blackwell.tcgen05.mxf8f6f4", scale_a=FP8[:, :1]),
        ArgumentError,
                         "blackwell.tcgen05.mxf8f6f4 does not take e4m3 x e4m3 with ue4m3 scales"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


# What each verb takes, by the names of its tensors.
ONE = torch.ones(())
VERBS = {
    "mm": (fmtsim.mm, {"a": A, "b": B}),
    "bmm": (fmtsim.bmm, {"a": A[None], "b": B[None]}),
    "linear": (fmtsim.linear, {"x": A, "w": A, "bias": A[0, :4]}),
    "int_mm": (lambda target, **given: fmtsim.int_mm(**given), {"a": INT, "b": INT.mT}),
    "mma": (fmtsim.mma, {"a": A, "b": A, "c": torch.ones(4, 4)}),
    "mma scaled": (lambda target, **given: fmtsim.mma(target="blackwell.tcgen05.mxf8f6f4", **given),
                   {"a": FP8, "b": FP8, "scale_a": torch.ones(4, 1), "scale_b": torch.ones(4, 1)}),
    "scaled_mm": (fmtsim.scaled_mm, {"a": FP8, "b": FP8.mT, "scale_a": ONE, "scale_b": ONE, "bias": A[0, :4].half(),
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


LIBRARY = {
    "dtypes": (lambda: fmtsim.mm(A, B.half(), target="x"), DtypeError,
        "a has dtype torch.bfloat16, b torch.float16; torch"),
    "fp8": (lambda: fmtsim.mm(FP8, FP8.mT, target="x"), DtypeError,
        "torch.mm does not take torch.float8_e4m3fn; call fmtsim.scaled_mm"),
    "out": (lambda: fmtsim.mm(A, B, target="x", out_dtype=torch.float16), DtypeError,
            "torch.mm does not turn torch.bfloat16 into torch.float16; choose torch.bfloat16 or torch.float32"),
    "wide out": (lambda: fmtsim.mm(A.float(), B.float(), target="x", out_dtype=torch.float64), DtypeError,
                 "torch.mm does not turn torch.float32 into torch.float64; choose torch.float32, or name a unit"),
    "bias": (lambda: fmtsim.linear(A, A, A[0, :4].float(), target="x"), DtypeError,
        "bias has dtype torch.float32; pass torch.bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIBRARY)
def test_what_torch_refuses_a_target_refuses(notebook, case):
    call, error, message = LIBRARY[case]
    with pytest.raises(error, match=message):
        call()


def test_an_unknown_target_or_unit_is_reported_first():
    words = torch.ones(3, 4, dtype=torch.int32)
    for verb in (fmtsim.mm, fmtsim.bmm, fmtsim.linear, fmtsim.int_mm):
        with pytest.raises(ArgumentError, match="^unknown target 'h300'; did you mean 'h200' or 'h100'"):
            verb(words, torch.ones(5, 2, 3), target="h300")
        with pytest.raises(ArgumentError, match="^unknown target 'hopper.mmma'; did you mean 'hopper.mma'"):
            verb(words, torch.ones(5, 2, 3), target="hopper.mmma")


def test_lengths_count_numbers_not_bytes():
    """A float4 tensor has two numbers in a byte: as many bytes as x has numbers is twice too long, and read past it."""
    fp4 = torch.zeros(8, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    with pytest.raises(ArgumentError, match="does not fit w of shape"):
        fmtsim.linear(A, fp4, target="exact")
    y = fmtsim.linear(A, fp4[:, :4], target="exact")
    assert y.shape == (4, 8) and not y.any()


def test_mma_reads_the_negative_bit_of_truncated_operands():
    negated = torch._neg_view(torch.full((1, 8), 1 + 2.0**-20))
    sums = fmtsim.mma(negated, torch.ones(1, 8), target=WGMMA)
    assert torch.equal(sums, fmtsim.mma(negated.clone(), torch.ones(1, 8), target=WGMMA)) and sums.item() == -8


@pytest.mark.parametrize("name", ["allow_tf32", "allow_fp16_accumulation", "strict"])
def test_what_equals_a_flag_is_refused_after_a_call_with_the_flag(name):
    a = torch.ones(2, 2, dtype=torch.bfloat16)
    fmtsim.mm(a, a, target="hopper.wgmma", **{name: False})
    with pytest.raises(ArgumentError, match=f"{name}=0 is not a flag"):
        fmtsim.mm(a, a, target="hopper.wgmma", **{name: 0})
