# SPDX-License-Identifier: Apache-2.0
"""The GPU's own unit: which call of torch a product is, under which switches it runs, and which GPU is a target's.

Without a GPU, calls are built as they would be and shown to torch's own checks on fake CUDA tensors, and the target's
GPU is made up: a device that says it is an H200. On that GPU, native bits are compared with emulated ones.
"""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import fmtsim
from fmtsim import cuda
from fmtsim.cuda import torch_calls as unit
from fmtsim.cuda.torch_calls import NativeCall, NativeScales, block_scales, switches, swizzled, torch_call
from fmtsim.formats.packing import unswizzled
from fmtsim.gemm.products import native
from fmtsim.gemm.products.operands import fp4_of_fp8
from fmtsim.lab.analysis.compare_native import compare_native
from fmtsim.support.errors import DeviceError, NativeWarning
from tests.cuda.native_operands import BF16, F4, F8, FP16, FP32, H200, matrix, ones


def built(call, left, right, bias=None, **scales):
    return torch_call(call, left, right, bias, NativeScales(**scales))


def accepted_by_torch(call):
    """Show a built call to torch's own checks of CUDA calls; return the shape and dtype that torch promises."""

    def fake(x):
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return [fake(member) for member in x] if isinstance(x, list) else x

    with FakeTensorMode():
        y = call.function(*map(fake, call.arguments), **{name: fake(x) for name, x in call.options.items()})
        return tuple(y.shape), y.dtype


def codes(rows, blocks, value=127):
    return torch.full((rows, blocks), value, dtype=torch.uint8)


SCALINGS = {
    "tensor": lambda m, n, k: {"a": ones(), "b": ones()},
    "row": lambda m, n, k: {"a": ones(m), "b": ones(n)},
    "block_128": lambda m, n, k: {"a": ones(m, -(-k // 128)), "b": ones(-(-n // 128), -(-k // 128))},
    "row_block_128": lambda m, n, k: {"a": ones(m, -(-k // 128)), "b": ones(n, -(-k // 128))},
    "mx": lambda m, n, k: {"a": codes(m, k // 32), "b": codes(n, k // 32)},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("shape", [(128, 256, 512), (256, 128, 384), (130, 384, 1152)])
def test_scaled_calls_pass_torchs_own_checks(kind, shape):
    m, n, k = shape
    call = NativeCall(
        function="scaled_mm", out_dtype=BF16, scaling=kind, rows_per_scale_b=128 if kind == "block_128" else 1
    )
    a, b = matrix(m, k).t().contiguous().t(), matrix(k, n)  # neither lies as torch wants it
    found = built(call, a, b, **SCALINGS[kind](m, n, k))
    assert found.name == ("torch._scaled_mm" if kind in ("tensor", "row") else "torch.nn.functional.scaled_mm")
    left, right = found.arguments[:2]
    assert left.is_contiguous() and right.t().is_contiguous()
    assert torch.equal(left.view(torch.uint8), a.view(torch.uint8))
    assert torch.equal(right.view(torch.uint8), b.view(torch.uint8))
    assert accepted_by_torch(found) == ((m, n), BF16)


@pytest.mark.parametrize("whole", [False, True])
def test_nvfp4_passes_torchs_own_checks(whole):
    a, b = (torch.zeros(rows, 64, dtype=torch.uint8).view(F4) for rows in (200, 160))
    extra = {"tensor_scale_a": ones(1), "tensor_scale_b": ones(1)} if whole else {}
    call = NativeCall(function="scaled_mm", out_dtype=BF16, scaling="nvfp4")
    found = built(call, a, b.t(), a=codes(200, 8, 56), b=codes(160, 8, 56), **extra)
    assert accepted_by_torch(found) == ((200, 160), BF16)
    scales, recipes = found.arguments[2:4]
    assert [s.dtype for s in scales] == [F8, FP32][: 1 + whole]
    assert [r.name for r in recipes] == ["BlockWise1x16", "TensorWise"][: 1 + whole]
    assert [s.name for s in found.options["swizzle_a"]] == ["SWIZZLE_32_4_4", "NO_SWIZZLE"][: 1 + whole]


def test_two_blocks_of_128_rows_on_the_left():
    call = NativeCall(function="scaled_mm", out_dtype=FP32, scaling="block_128", rows_per_scale_a=128)
    found = built(call, matrix(256, 256), matrix(128, 256).t(), a=ones(2, 2), b=ones(128, 2))
    assert [r[0].name for r in found.arguments[3::2]] == ["BlockWise128x128", "BlockWise1x128"]
    assert accepted_by_torch(found) == ((256, 128), FP32)


def test_torchs_checks_see_a_planted_error():
    call = NativeCall(function="scaled_mm", out_dtype=BF16, scaling="row_block_128")
    found = built(call, matrix(128, 256), matrix(256, 256).t(), **SCALINGS["row_block_128"](128, 256, 256))
    found.arguments[2][0] = found.arguments[2][0].contiguous()  # rows contiguous: the wrong way round
    with pytest.raises(RuntimeError, match="scale"):
        accepted_by_torch(found)


@pytest.mark.parametrize(
    ("call", "name", "options"),
    [
        (NativeCall(function="mm", out_dtype=BF16), "torch.mm", {}),
        (NativeCall(function="mm", out_dtype=FP32), "torch.mm", {"out_dtype": FP32}),
        (NativeCall(function="bmm", out_dtype=FP32), "torch.bmm", {"out_dtype": FP32}),
    ],
)
def test_plain_calls(call, name, options):
    a, b = matrix(8, 16, BF16), matrix(16, 24, BF16)
    a, b = (a[None], b[None]) if call.function == "bmm" else (a, b)
    found = built(call, a, b)
    assert (found.name, found.options) == (name, options)
    assert found.arguments[0] is a and found.arguments[1] is b  # their strides decide the order of sums
    assert accepted_by_torch(found)[1] == call.out_dtype


def test_linear_and_int8_calls():
    w, bias = matrix(24, 16, BF16), matrix(1, 24, BF16)[0]
    found = built(NativeCall(function="linear", out_dtype=BF16), matrix(8, 16, BF16), w.mT, bias)
    assert found.function is F.linear and found.arguments[1].stride() == w.stride() and found.arguments[2] is bias
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((32, 16), (16, 8)))
    found = built(NativeCall(function="int_mm", out_dtype=torch.int32), a, b)
    assert torch.equal(found(), a.int() @ b.int()) and found.arguments[1].t().is_contiguous()


def test_results_of_8_bits_take_a_scale_and_others_none():
    scales = {"a": ones(), "b": ones(), "result": torch.full((1,), 0.5)}
    for dtype, present in ((F8, True), (BF16, False)):
        call = NativeCall(function="scaled_mm", out_dtype=dtype, scaling="tensor", fast_accum=True)
        options = built(call, matrix(16, 32), matrix(16, 32).t(), **scales).options
        assert ("scale_result" in options) == present and options["use_fast_accum"] is True


def test_missing_scales_are_ones():
    call = NativeCall(function="scaled_mm", out_dtype=BF16, scaling="row")
    found = built(call, matrix(32, 32), matrix(16, 32).t(), a=ones(32, 1) * 3)
    assert found.arguments[2].flatten().tolist() == [3.0] * 32 and found.arguments[3].flatten().tolist() == [1.0] * 16


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (200, 20), (33, 5), (384, 7)])
def test_small_scales_are_swizzled_as_they_are_read(rows, blocks):
    codes = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    flat = swizzled(codes)
    across = -(-blocks // 4)
    for row, block in itertools.product(range(rows), range(blocks)):  # as cuBLAS defines it, one scale after another
        tile = row // 128 * across + block // 4
        assert flat[512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] == codes[row, block]
    assert len(flat) == 512 * across * -(-rows // 128) and int((flat != 0).sum()) == int((codes != 0).sum())
    assert flat.is_contiguous() and flat.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    assert torch.equal(unswizzled(flat, rows, blocks), codes)


def test_large_scales_are_laid_out():
    s = torch.arange(15.0).view(3, 5)
    assert torch.equal(block_scales(s, 1), s) and block_scales(s, 1).stride() == (1, 3)
    tall = block_scales(s, 128)
    assert tall.shape == (8, 3) and tall.stride() == (1, 8) and torch.equal(tall[:5], s.t())


def test_fp4_is_packed_again():
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    wide = fmtsim.gemm.products.operands.read_operand(codes.view(F4), fmtsim.get_format("e2m1"))
    assert torch.equal(fp4_of_fp8(wide).view(torch.uint8), codes)


def test_unaligned_numbers_are_copied():
    x = matrix(4, 64).view(-1)[3:163].view(10, 16)
    moved = unit.row_major(x)
    assert x.data_ptr() % 16 and not moved.data_ptr() % 16 and torch.equal(moved.view(torch.uint8), x.view(torch.uint8))


# --- Under which switches --------------------------------------------------------------------------------------------

MATMUL = torch.backends.cuda.matmul


def state():
    names = ("allow_fp16_accumulation", "allow_bf16_reduced_precision_reduction",
             "allow_fp16_reduced_precision_reduction")  # fmt: skip
    return [MATMUL.fp32_precision, *(getattr(MATMUL, name) for name in names), torch.get_float32_matmul_precision()]


@pytest.fixture
def restored():
    yield
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = "none"
    MATMUL.allow_fp16_accumulation = False
    MATMUL.allow_bf16_reduced_precision_reduction = MATMUL.allow_fp16_reduced_precision_reduction = True


@pytest.mark.parametrize("allowed", ["nothing", "legacy", "new", "all"])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_switches_are_set_and_restored(restored, allowed, tf32, half):
    if allowed in ("legacy", "all"):
        MATMUL.allow_tf32 = True
    if allowed == "new":
        torch.set_float32_matmul_precision("high")
        MATMUL.fp32_precision = "tf32"
    if allowed == "all":
        MATMUL.allow_fp16_accumulation = True
        MATMUL.allow_bf16_reduced_precision_reduction = MATMUL.allow_fp16_reduced_precision_reduction = False
    before = state()
    with switches(NativeCall(function="mm", out_dtype=FP32, tf32=tf32, fp16_accumulation=half)):
        assert (MATMUL.fp32_precision == "tf32") == tf32 and MATMUL.allow_fp16_accumulation == half
        assert MATMUL.allow_bf16_reduced_precision_reduction and MATMUL.allow_fp16_reduced_precision_reduction
    assert state() == before


def test_switches_are_restored_after_an_error(restored):
    MATMUL.allow_bf16_reduced_precision_reduction = False
    with pytest.raises(KeyError), switches(NativeCall(function="mm", out_dtype=FP32, tf32=True)):
        raise KeyError
    assert MATMUL.fp32_precision in ("none", "ieee") and not MATMUL.allow_bf16_reduced_precision_reduction


def test_a_refused_call_says_what_torch_said():
    with pytest.raises(DeviceError, match=r"torch.mm refused \[2, 3\] torch.float32 x \[4, 2\] torch.float32 -> "):
        unit.run(NativeCall(function="mm", out_dtype=FP32), torch.ones(2, 3), torch.ones(4, 2))


# Whether a GPU, its library and its settings are those of a target.


@pytest.mark.parametrize(
    ("library", "families", "reason"),
    [
        (H200, {"hopper"}, None),
        ("NVIDIA H200, cuBLASLt 13", {"hopper", "fp32_fma"}, None),
        ("NVIDIA H200 (114 or 132 multiprocessors), cuBLASLt 13", set(), None),
        ("NVIDIA H20 (132 multiprocessors), cuBLASLt 13", {"hopper"}, "is a NVIDIA H200, the target a NVIDIA H20"),
        ("NVIDIA B200, cuBLAS", {"blackwell"}, "the device is a NVIDIA H200, the target a NVIDIA B200"),
        ("NVIDIA H200 (78 multiprocessors)", {"hopper"}, "the device has 132 multiprocessors, the target 78"),
        (H200, {"blackwell"}, "compute capability 9.0, the target 10.x"),
        ("no library: every sum is one chain", set(), "which is not an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_gpus_are_told_apart(hopper, library, families, reason):
    found = unit.other_gpu(library, frozenset(families), 0)
    assert found is None if reason is None else reason in found


def test_a_gpu_of_rocm_is_no_target(hopper):
    hopper.setattr(torch.version, "hip", "6.4")
    reason = "torch is built for ROCm, and the target is an NVIDIA GPU"
    assert unit.other_gpu(H200, frozenset({"hopper"}), 0) == reason == native.why_not_native("h200", "cuda:0")


def test_the_plans_that_come_with_fmtsim(hopper):
    assert {name for name in fmtsim.list_targets() if native.is_native(name)} == {"h200"}
    assert "the target a NVIDIA A100" in native.why_not_native("a100", "cuda:0")
    assert native.why_not_native("h200.sglang") == "target h200.sglang has products of another library than cuBLAS"


@pytest.mark.parametrize(
    ("name", "value", "fine"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", True),  # what torch takes on Hopper without it
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", False),
        ("NVIDIA_TF32_OVERRIDE", "0", False),
        ("CUBLASLT_WORKSPACE_SIZE", "4096", False),
    ],
)
def test_settings_that_change_the_librarys_choices(hopper, name, value, fine):
    assert unit.other_settings(0) is None
    hopper.setenv(name, value)
    found = unit.other_settings(0)
    assert found is None if fine else found.startswith(f"{name}={value} is set")
    assert unit.other_settings(0, workspaces=False) == (None if "WORKSPACE" in name else found)


def test_other_settings_of_torch(hopper):
    hopper.setattr(torch.cuda.tunable, "is_enabled", lambda: True)
    assert "torch.cuda.tunable chooses kernels of its own" in unit.other_settings(0)
    hopper.setattr(torch.cuda.tunable, "is_enabled", lambda: False)
    hopper.setattr(torch._C, "_get_sm_carveout_experimental", lambda: 16, raising=False)
    assert "16 multiprocessors are kept from FP8 products" in unit.other_settings(0)


@pytest.mark.parametrize(
    ("torch_version", "blas", "said"),
    [
        ("2.11.0+cu130", "13.1.0", []),
        ("2.12.1+cu130", "13.1.0", ["torch 2.12.1+cu130 instead of 2.11.0+cu130"]),
        ("2.11.0+cu130", "13.2.4", ["cuBLASLt 13.2.4 instead of 13.1.0"]),
        ("2.11.0+cu130", None, []),
    ],
)
def test_versions_are_compared(monkeypatch, torch_version, blas, said):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(unit, "cublaslt_version", lambda: blas)
    assert unit.other_versions(H200) == said
    assert unit.other_versions("NVIDIA H100, cuBLASLt 13") == []


def test_other_versions_warn_once(monkeypatch):
    monkeypatch.setattr(cuda, "other_versions", lambda library: ["torch 3 instead of 2"])
    native._warn_of_versions.cache_clear()
    with pytest.warns(NativeWarning, match="target h200 was recorded with other versions than are here: torch 3 inst"):
        native._warn_of_versions("h200", H200)
    native._warn_of_versions("h200", H200)
    native._warn_of_versions.cache_clear()


def on_the_gpu():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NativeWarning)  # of another version of the library
        return native.is_native("h200")


ON_THE_GPU = pytest.mark.skipif(not on_the_gpu(), reason="needs the target's GPU")


@ON_THE_GPU
@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.NativeWarning")
@pytest.mark.parametrize("shape", [(64, 64, 64), (256, 384, 512), (64, 64, 4096)])
@pytest.mark.parametrize("dtype", [BF16, FP16, F8])
def test_native_bits_are_emulated_bits(shape, dtype):
    m, n, k = shape
    a, b = matrix(m, k, dtype).cuda(), matrix(n, k, dtype, 1).cuda()
    if dtype == F8:
        one = torch.ones((), device="cuda")
        for fast in (False, True):
            options = {"out_dtype": BF16, "use_fast_accum": fast, "target": "h200"}
            assert compare_native(fmtsim.scaled_mm, a, b.t(), one, one, **options).equal
    else:
        assert compare_native(fmtsim.mm, a, b.t(), target="h200").equal
        assert compare_native(fmtsim.mm, a, b.t(), target="h200", out_dtype=FP32, emulate_on="cpu").equal
