# SPDX-License-Identifier: Apache-2.0
"""When a product with a target runs on the GPU's own unit, and what is said where it does not.

The GPU is made up: a device that says it is an H200, and native calls that are kept and return zeros.
"""

import warnings
from dataclasses import replace

import pytest
import torch

import fmtsim
from fmtsim import cuda
from fmtsim.cuda.torch_calls import swizzled
from fmtsim.gemm.products import native
from fmtsim.gemm.products.resolver import recorded_calls, resolve
from fmtsim.gemm.targets import doubts
from fmtsim.gemm.targets.target import Target
from fmtsim.spec.call import GemmCall
from fmtsim.spec.plan import GemmPlan
from fmtsim.support.errors import ArgumentError, LibraryBugWarning, NativeWarning
from tests.cuda.native_operands import BF16, F4, F5, F8, FP16, FP32, matrix, ones


def odd(*shape):
    """Return scales that are not powers of two, each another."""
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) / 3


@pytest.fixture
def ran(hopper):
    """Let native calls return zeros and be kept."""
    calls = []

    def run(call, a, b, bias=None, scales=None):
        calls.append((call, a, b, bias, scales))
        return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=call.out_dtype)

    hopper.setattr(cuda, "run_native", run)
    return calls


A16, B16 = matrix(16, 32, BF16), matrix(32, 16, BF16, 1)


@pytest.mark.parametrize(("chosen", "taken"), [(None, True), (True, True), (False, False)])
def test_who_multiplies(ran, chosen, taken):
    y = fmtsim.mm(A16, B16, target="h200", native=chosen)
    assert bool(ran) == taken == (y.abs().max().item() == 0.0)
    fmtsim.mm(A16, B16, target="hopper.wgmma", native=False)
    assert len(ran) == taken


def test_every_verb(ran):
    one, bias = ones(), matrix(1, 16, BF16)[0]
    fmtsim.mm(A16, B16, target="h200", out_dtype=FP32)
    fmtsim.bmm(A16[None], B16[None], target="h200")
    fmtsim.linear(A16.view(4, 4, 32), B16.mT, bias, target="h200")
    fmtsim.mm(A16.float(), B16.float(), target="h200", allow="tf32")
    fmtsim.mm(A16.half(), B16.half(), target="h200", allow="fp16_accumulation")
    fmtsim.int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8), target="h200")
    fmtsim.scaled_mm(A16.to(F8), B16.to(F8), one, one, bias, out_dtype=BF16, target="h200", use_fast_accum=True)
    names = ["mm", "bmm", "linear", "mm", "mm", "int_mm", "scaled_mm"]
    assert [call.function for call, *_ in ran] == names
    assert [call.out_dtype for call, *_ in ran] == [FP32, BF16, BF16, FP32, FP16, torch.int32, BF16]
    assert [call.tf32 for call, *_ in ran] == [name == 3 for name in range(7)]
    assert [call.fp16_accumulation for call, *_ in ran] == [name == 4 for name in range(7)]
    assert ran[2][3] is not None and ran[6][0].scaling == "tensor" and ran[6][0].fast_accum


def test_what_reaches_a_call_is_what_was_given(ran):
    """Operands, bias and scales, each in its place; what torch adds itself is added once."""
    bias, (row, column) = matrix(1, 16, BF16, 2)[0], (odd(16, 1), odd(1, 16))
    fmtsim.linear(A16, B16.mT, bias, target="h200")
    _, a, b, added, scales = ran[-1]
    assert torch.equal(a, A16) and torch.equal(b, B16) and torch.equal(added, bias) and scales == (None,) * 5
    a, b, one, two, three = A16.to(F8), B16.to(F8), *(torch.tensor(float(x)) for x in (2, 3, 5))
    fmtsim.scaled_mm(a, b, one, two, bias, three, target="h200")
    call, left, right, added, scales = ran[-1]
    assert (call.out_dtype, call.fast_accum, call.rows_per_scale_a, call.rows_per_scale_b) == (F8, False, 1, 1)
    assert torch.equal(left.float(), a.float()) and torch.equal(right.float(), b.float()) and torch.equal(added, bias)
    assert [scales.a, scales.b, scales.result] == [one, two, three] and scales[2:4] == (None, None)
    fmtsim.scaled_mm(a, b, row, column, out_dtype=BF16, target="h200")
    call, *_, added, scales = ran[-1]
    assert call.scaling == "row" and added is None and scales[2:] == (None,) * 3
    assert torch.equal(scales.a.reshape(16, 1), row) and torch.equal(scales.b.reshape(1, 16), column)


def test_gradients_are_native_too(ran):
    a, b = A16.clone().requires_grad_(), B16.clone().requires_grad_()
    fmtsim.mm(a, b, target="h200").sum().backward()
    assert [call.function for call, *_ in ran] == ["mm"] * 3
    assert a.grad.abs().max() == b.grad.abs().max() == 0.0


@pytest.mark.parametrize(
    ("kind", "scales", "tall"),
    [("block_128", (odd(16, 2), odd(2, 1)), (1, 128)), ("row_block_128", (odd(16, 2), odd(2, 16)), (1, 1)),
     ("block_128", (odd(1, 2), odd(2, 16)), (128, 1))],
)  # fmt: skip
def test_blocks_reach_the_call_once_each(ran, kind, scales, tall):
    a, b = matrix(16, 256), matrix(16, 256).t()
    recipes = {"scale_recipes": (f"BlockWise{tall[0]}x128", f"BlockWise{tall[1]}x128")}
    fmtsim.scaled_mm(a, b, *scales, target="h200", **recipes)
    call, *_, found = ran[0]
    assert (call.scaling, (call.rows_per_scale_a, call.rows_per_scale_b)) == (kind, tall)
    assert torch.equal(found.a, scales[0]) and torch.equal(found.b, scales[1].mT) and found[2:] == (None,) * 3


def test_small_blocks_reach_the_call_as_codes(ran, monkeypatch):
    monkeypatch.setattr(native, "why_not_native", lambda target, device: None)
    monkeypatch.setattr(native, "_gpu_reason", lambda target, index: (None, False))
    codes = torch.randint(100, 140, (16, 8), dtype=torch.uint8)
    flat = swizzled(codes).view(torch.float8_e8m0fnu)
    fmtsim.scaled_mm(matrix(16, 256), matrix(16, 256).t(), flat, flat, out_dtype=BF16, target="b200")
    call, *_, found = ran[0]
    assert call.scaling == "mx" and torch.equal(found.a, codes) and torch.equal(found.b, codes)


REFUSED = [
    (lambda: fmtsim.mm(A16, B16, target="hopper.wgmma", native=True), "a unit or datapath alone is not a GPU"),
    (lambda: fmtsim.mm(A16, B16, target="h200", plan=fmtsim.GemmPlan(), native=True), "plan= replaces the library's"),
    (lambda: fmtsim.mm(A16, B16, target="b200", native=True), "the device is a NVIDIA H200, the target a NVIDIA B200"),
    (lambda: fmtsim.mm(A16.float(), B16.float(), formats="bf16", target="h200", native=True),
     "torch does not multiply torch.float32 tensors as bf16"),
    (lambda: fmtsim.linear(A16, B16.mT, matrix(1, 16, BF16)[0], target="h200", out_dtype=FP32, native=True),
     "torch.nn.functional.linear gives torch.bfloat16, not torch.float32"),
    (lambda: fmtsim.mm(A16.half(), B16.half(), target="h200", accumulate="fp16", out_dtype=FP32, native=True),
     "torch does not sum torch.float16 products in fp16 for torch.float32 results"),
    (lambda: fmtsim.scaled_mm(matrix(16, 128), matrix(16, 128).t(), ones(16, 1), ones(1, 1), target="h200",
                              scale_recipes=("BlockWise1x128", "BlockWise128x128"), use_fast_accum=True,
                              native=True), "torch has no use_fast_accum with 1x128 and 128x128 scales"),
    (lambda: fmtsim.scaled_mm(matrix(16, 32), matrix(16, 32).t(), ones(16, 1), ones(1, 16), target="h200", native=True),
     "cuBLASLt gives no torch.float8_e4m3fn results with row scales"),
    (lambda: fmtsim.mm(A16.float(), B16.float(), formats="tf32", target="h200", native=True),
     "torch does not multiply torch.float32 tensors as tf32"),
    (lambda: fmtsim.scaled_mm(A16.float(), B16.to(F8), ones(), ones(), formats=("e4m3", None), out_dtype=BF16,
                              target="h200",
                              native=True), "torch does not multiply a of dtype torch.float32 with e4m3 numbers"),
    (lambda: fmtsim.scaled_mm(A16.to(F8), B16.to(F8), ones(), ones(), accumulate="fp16", out_dtype=BF16, target="h200",
                              native=True), "torch does not sum FP8 products in fp16"),
    (lambda: fmtsim.scaled_mm(matrix(16, 128), matrix(16, 128).t(), ones(16, 1), ones(1, 1), None, ones(), BF16,
                              target="h200", scale_recipes=("BlockWise1x128", "BlockWise128x128"),
                              native=True), "torch.nn.functional.scaled_mm has no scale_result"),
    (lambda: fmtsim.scaled_mm(matrix(16, 128, F5), matrix(16, 128).t(), ones(16, 1), ones(1, 1), out_dtype=BF16,
                              target="h200", scale_recipes=("BlockWise1x128", "BlockWise128x128"),
                              native=True), "multiplies e4m3 alone with 1x128 and 128x128 scales"),
    (lambda: fmtsim.scaled_mm(matrix(16, 128), matrix(16, 128).t(), ones(16, 1), ones(1, 1), target="h200",
                              scale_recipes=("BlockWise1x128", "BlockWise128x128"), native=True,
                              out_dtype=F8),
     "cuBLASLt gives no torch.float8_e4m3fn results with block_128 scales"),
]  # fmt: skip


@pytest.mark.parametrize(("product", "reason"), REFUSED)
def test_true_says_why_not(ran, product, reason):
    with pytest.raises(ArgumentError) as error:
        product()
    assert str(error.value).startswith("native=True is not possible: ") and reason in str(error.value)
    assert str(error.value).endswith("; pass native=False to emulate the product") and ran == []


def test_without_a_card():
    with pytest.raises(ArgumentError, match="the tensors are on cpu, not on a CUDA GPU; move them there with .cuda()"):
        fmtsim.mm(A16, B16, target="h200", native=True)
    assert not native.is_native("h200", "cpu")
    if not torch.cuda.is_available():
        assert native.why_not_native("h200") == native.why_not_native("h200", 1) == "torch sees no CUDA GPU"
    with pytest.raises(ArgumentError, match="native='yes' is not a flag; pass None .where possible., True or False"):
        fmtsim.mm(A16, B16, target="h200", native="yes")


def test_what_torch_lacks_is_emulated_without_a_word(ran):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = fmtsim.mm(A16.float(), B16.float(), formats="bf16", target="h200", out_dtype=FP32)
    assert ran == [] and torch.equal(y, fmtsim.mm(A16, B16, target="h200", out_dtype=FP32, native=False))


def test_a_setting_in_the_way_is_said_once(ran, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with pytest.warns(NativeWarning, match="the GPU is the target, but the product is emulated: CUBLAS_WORKSPACE_C"):
        fmtsim.mm(A16, B16, target="h200")
    fmtsim.mm(A16, B16, target="h200")  # a second warning would be an error
    assert ran == []


def test_explain_mm_says_who_would_multiply(ran):
    def runs(a=A16, b=B16, **options):
        rows = dict(fmtsim.explain_mm(a, b, **{"target": "h200", **options}).rows)
        return rows.get("runs")

    assert runs() is None and runs(target="exact", native=True) is None  # tensors on the CPU
    assert runs(native=True) == "natively, by torch.mm on this GPU"
    assert runs(A16.to(F8), B16.to(F8), native=True) == "natively, by torch._scaled_mm on this GPU"
    assert runs(native=False) == "emulated: native=False"
    assert runs(target="b200", native=True).startswith("not at all (native=True): the device is a NVIDIA H200")
    assert ran == []


def test_the_operator_keeps_torchs_rules():
    operator = torch.ops.fmtsim.native_gemm.default
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, (A16, B16, "mm", BF16), test_utils=checks)
    torch.library.opcheck(operator, (A16[None], B16[None], "bmm", BF16), test_utils=checks)


def test_compiled_code_runs_natively(ran):
    torch._dynamo.reset()
    product = torch.compile(lambda a, b: fmtsim.mm(a + 1, b, target="h200") * 2, backend="eager", fullgraph=True)
    assert not product(A16, B16).any() and [call.function for call, *_ in ran] == ["mm"]
    torch._dynamo.reset()


@pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a"
)  # of frames that it tries once the product was refused
def test_compiled_code_refuses_a_native_product_with_a_plan():
    torch._dynamo.reset()
    plan = fmtsim.GemmPlan()
    product = torch.compile(lambda a, b: fmtsim.mm(a, b, target="h200", plan=plan, native=True), backend="eager")
    with pytest.raises(ArgumentError, match="native=True is not possible: plan= replaces"):
        product(A16, B16)


def layer(ran, **options):
    config = fmtsim.linear_config(**{"x": "e4m3", "w": "e4m3", "g": "e5m2", "target": "h200", **options})
    x, w = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (1, 2))
    y = fmtsim.EmulatedGEMM.apply(x, w, torch.ones(32), config)
    y.sum().backward()
    return y, x.grad, w.grad


def test_layers_run_natively(ran):
    y, dx, dw = layer(ran, native=True, fast_accum=True)
    assert [(call.function, call.out_dtype, call.fast_accum) for call, *_ in ran] == [
        ("scaled_mm", FP32, True), ("scaled_mm", FP32, False), ("scaled_mm", FP32, False),
    ]  # fmt: skip
    assert [(a.dtype, b.dtype) for _, a, b, *_ in ran] == [(F8, F8), (F5, F8), (F5, F8)]
    assert torch.equal(y, torch.ones(32, 32)) and not dx.any() and not dw.any()  # the bias is added in float32
    layer(ran, native=False)
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("fmt", "function", "dtype", "tf32"),
    [("bf16", "mm", BF16, False), ("fp16", "mm", FP16, False), ("tf32", "linear", FP32, True),
     (None, "linear", FP32, False)],
)  # fmt: skip
def test_layers_of_wide_formats(ran, fmt, function, dtype, tf32):
    layer(ran, x=fmt, w=fmt, g=fmt)
    assert [call.function for call, *_ in ran] == [function, "mm", "mm"]
    assert all(a.dtype == b.dtype == dtype and call.tf32 == tf32 for call, a, b, *_ in ran)


def test_block_scales_of_layers_become_codes(ran, monkeypatch):
    monkeypatch.setattr(native, "why_not_native", lambda target, device: None)
    monkeypatch.setattr(native, "_gpu_reason", lambda target, index: (None, False))
    for fmt, dtype in (("mxfp8_e4m3", F8), ("nvfp4", F4)):
        del ran[:]
        layer(ran, x=fmt, w=fmt, g=fmt, target="b200")
        call, a, b, _, scales = ran[0]
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        q = fmtsim.encode(x, fmt)
        assert a.dtype == b.dtype == dtype and scales.a.dtype == torch.uint8
        assert torch.equal(a.view(torch.uint8), (q.codes if dtype == F4 else q.unpacked()).view(torch.uint8))
        assert torch.equal(scales.a, q.scales.view(torch.uint8).reshape(scales.a.shape))
        assert (scales.tensor_scale_a is not None) == (fmt == "nvfp4") and call.scaling == (
            "mx" if dtype == F8 else "nvfp4"
        )


def test_configs_check_native():
    with pytest.raises(ArgumentError, match="native=True runs products on the GPU that target= names"):
        fmtsim.Gemm(target="hopper.wgmma", native=True)
    with pytest.raises(ArgumentError, match="Gemm native=1 is not allowed; pass True or False or None"):
        fmtsim.Gemm(target="h200", native=1)
    model = fmtsim.convert(torch.nn.Linear(16, 16), format="e4m3", target="h200", native=False, fast_accum=True)
    assert model.emulation.config.fprop.native is False and model.emulation.config.fprop.fast_accum
    with pytest.raises(ArgumentError, match="convert needs target=: a GPU"):
        fmtsim.convert(torch.nn.Linear(16, 16), recipe=model.emulation.config, native=False)


@pytest.fixture
def drops(ran, monkeypatch):
    """Let the target's plans leave out what lies beyond the 960th product, where K is 1000."""
    resolved, find = [], Target.resolve

    def resolve(self, call, **options):
        resolved.append(call)
        found = find(self, call, **options)
        return replace(found, plan=GemmPlan(k_end=960), basis="rule") if call.k == 1000 else found

    monkeypatch.setattr(Target, "resolve", resolve)
    monkeypatch.setattr(native, "_inspected", set())
    monkeypatch.setattr(doubts, "_warned", set())
    return resolved


def test_a_native_call_warns_of_products_that_the_library_leaves_out(ran, drops):
    a, b = matrix(16, 1000, BF16), matrix(1000, 24, BF16)
    with pytest.warns(
        LibraryBugWarning, match="the last 40 of the 1000 products of every sum are never mult"
    ) as record:
        fmtsim.mm(a, b, target="h200")
    assert record[0].filename == __file__ and [call.function for call, *_ in ran] == ["mm"]
    asked = len(drops)
    for _ in range(2):
        fmtsim.mm(a, b, target="h200")  # neither warns again nor asks
        fmtsim.mm(a[:, :512], b[:512], target="h200")
    assert len(drops) == asked + 1 and len(ran) == 5
    with pytest.warns(LibraryBugWarning, match="of linear M=32 N=24 K=1000"):
        fmtsim.linear(torch.cat((a, a)).view(4, 8, 1000), b.mT.contiguous(), matrix(1, 24, BF16)[0], target="h200")
    assert drops[-1].operation == "linear" or drops[-1].k == 1024


VERBS = {
    "mm": lambda **o: fmtsim.mm(A16, B16.mT.contiguous().mT, **o),
    "fp16 sums": lambda **o: fmtsim.mm(A16.half(), B16.half(), allow="fp16_accumulation", **o),
    "tf32": lambda **o: fmtsim.mm(A16.float().mT.contiguous().mT, B16.float(), allow="tf32", **o),
    "fp64": lambda **o: fmtsim.mm(A16.double(), B16.double(), **o),
    "bmm": lambda **o: fmtsim.bmm(A16.repeat(3, 1, 1), B16.repeat(3, 1, 1), out_dtype=FP32, **o),
    "linear": lambda **o: fmtsim.linear(A16.view(4, 4, 32), B16.mT, A16[0, :16], **o),
    "int_mm": lambda **o: fmtsim.int_mm(torch.ones(32, 16).to(torch.int8), torch.ones(16, 8).to(torch.int8), **o),
    "scaled_mm": lambda **o: fmtsim.scaled_mm(A16.to(F8), B16.to(F5), ones(), ones(), A16[0, :16], out_dtype=BF16, **o),
    "rows": lambda **o: fmtsim.scaled_mm(
        A16.to(F8), B16.to(F8), odd(16, 1), odd(1, 16), out_dtype=BF16, use_fast_accum=True, **o),
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_a_native_call_is_looked_up_as_its_emulation_is(ran, drops, verb):
    VERBS[verb](target="h200")
    native_call = drops[-1]
    with recorded_calls() as calls:
        VERBS[verb](target="h200", native=False)
    assert [call.facts() for call in calls] == [native_call] and len(ran) == 1


def test_a_guess_is_no_bug_of_a_native_call(ran, drops, monkeypatch):
    chain = resolve(GemmCall(operation="mm", m=16, n=16, k=32, a="bf16", b="bf16", out=BF16, target="hopper.wgmma"))
    guess = replace(chain, plan=GemmPlan(k_end=8), basis="guess")
    monkeypatch.setattr(Target, "resolve", lambda self, call, **_: guess)
    fmtsim.mm(A16, B16, target="h200")


def test_what_the_target_does_not_know_is_left_to_torch(ran, drops, monkeypatch):
    def refuse(self, call, **options):
        raise ArgumentError("no unit")

    monkeypatch.setattr(Target, "resolve", refuse)
    fmtsim.mm(A16, B16, target="h200")
    assert len(ran) == 1


def test_a_compiled_program_warns_as_it_runs_and_is_one_for_all_sizes(ran, drops):
    graphs = []
    compiled = torch.compile(
        lambda a, b: fmtsim.mm(a, b, target="h200"),
        backend=lambda graph, _: graphs.append(graph) or graph,
        dynamic=True,
    )
    compiled(matrix(16, 992, BF16), matrix(992, 24, BF16))
    with pytest.warns(LibraryBugWarning, match="mm M=16 N=24 K=1000"):
        compiled(matrix(16, 1000, BF16), matrix(1000, 24, BF16))
    assert len(graphs) == 1 and len(ran) == 2
