# SPDX-License-Identifier: Apache-2.0
"""How people come in: ``fmtsim.launch`` of PTX, Triton and CUDA C++, kernels in ``simulate``, compiled graphs."""

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import fmtsim
from fmtsim.support.errors import ArgumentError, DataError, DtypeError
from tests.support.recorded import GOLDEN, needs_golden

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
INDUCTOR = GOLDEN / "triton/inductor_h100.zip"

# y[i] = 3 x[i] + s for the first n elements, 64 threads a block
PTX = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 y, .param .u32 n, .param .f32 s)
.reqntid 64
{
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .f32 %f<8>;
    ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [n]; ld.param.f32 %f1, [s];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %tid.x; mad.lo.s32 %r4, %r2, 64, %r3;
    setp.ge.s32 %p1, %r4, %r1;
    @%p1 bra DONE;
    mul.wide.s32 %rd3, %r4, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    fma.rn.f32 %f3, %f2, 0f40400000, %f1;
    st.global.f32 [%rd5], %f3;
DONE:
    ret;
}
"""
X = torch.linspace(-3, 3, 100)


def scaled(**changes) -> torch.Tensor:
    y = torch.zeros(100)
    arguments = {"kernel": PTX, "grid": 2, "args": (X, y, 100, 0.5)} | changes
    kernel, grid, args = (arguments.pop(name) for name in ("kernel", "grid", "args"))
    fmtsim.launch(kernel, grid, *args, **arguments)
    return y


def test_ptx_writes_its_tensors_in_place():
    want = (X.double() * 3 + 0.5).float()
    assert torch.equal(scaled(), want) and torch.equal(scaled(grid=(2, 1), target="h200", block=64), want)
    y = torch.zeros(50)
    record = fmtsim.launch(PTX, 1, X[10:], y, 50, 0.5)
    assert torch.equal(y, want[10:60])  # a view begins at its own address
    assert (record.kernel, record.grid, record.block, record.threads) == ("scale", (1, 1, 1), (64, 1, 1), 64)
    assert record.exact and record.instructions > 0 and "every bit" in str(record) and not record.reasons


@pytest.mark.parametrize("register", ["clock", "clock64", "globaltimer", "smid"])
def test_what_differs_from_run_to_run_is_said(register: str) -> None:
    move = f"mov.u64 %rd1, %{register};" if register in ("clock64", "globaltimer") else f"mov.u32 %r1, %{register};"
    text = PTX.replace("ld.param.u64 %rd1, [x];", f"{move} ld.param.u64 %rd1, [x];")
    record = fmtsim.launch(text, 2, X, torch.zeros(100), 100, 0.5)
    assert record.reasons == (f"%{register} differs from run to run on a GPU and is 0 here",) and not record.exact


REFUSED = {
    "target": ({"target": "h10"}, "target='h10', which is not known; did you mean 'h100'"),
    "B200": ({"target": "b200"}, "target='b200', whose PTX is refused until a GPU has recorded it"),
    "architecture": ({"kernel": PTX.replace("sm_80", "sm_100a")}, r"scale is for sm_100a, which does not run on h100"),
    "no kernel": ({"kernel": "softmax"}, r"text without .version \(PTX\) and without __global__"),
    "entry": ({"entry": "scalar"}, "entry='scalar' is not in the text; did you mean 'scale'?"),
    "grid of zero": ({"grid": 0}, "grid=0; each number is at least 1, and at most 2,147,483,647 x 65,535 x 65,535"),
    "negative grid": ({"grid": (1, -1)}, r"grid=\(1, -1\); each number is at least 1"),
    "tall grid": ({"grid": (1, 65_536)}, r"grid=\(1, 65536\); .* at most"),
    "grid of four": ({"grid": (1, 1, 1, 1)}, "give an int or a tuple of up to three"),
    "grid of floats": ({"grid": 1.5}, "grid=1.5; give an int"),
    "block": ({"block": 128}, r"block=\(128, 1, 1\), but scale requires \(64,\) threads"),
    "no block": ({"kernel": PTX.replace(".reqntid 64", "")}, "how many threads a block has: pass block="),
    "large block": ({"kernel": PTX.replace(".reqntid 64", ""), "block": (64, 64)}, "has 4,096 threads; .* 1,024"),
    "shared memory": ({"shared": 300_000}, "shared=300000; a block has 0 to 232,448 bytes"),
    "keywords": ({"n": 3}, "n: PTX takes arguments by position"),
    "config": ({"config": 1}, "config=1 is for @triton.autotune"),
    "few arguments": ({"args": (X,)}, "scale takes 4 arguments and got 1"),
    "large number": ({"args": (X, X, 2**32, 0.5)}, r"argument 2 \(n\) is 4294967296, which .u32 does not hold"),
    "huge number": ({"args": (X, X, 3, 10**400)}, r"argument 3 \(s\) is 10+.*, which .f32 does not hold"),
    "meta": ({"args": (X.to("meta"), X, 3, 0.5)}, r"argument 0 \(x\) is on meta; .* move it with .cpu\(\)"),
    "sparse": ({"args": (X.to_sparse(), X, 3, 0.5)}, "layout torch.sparse_coo; give a plain strided tensor"),
    "out of range": ({"args": (X, torch.zeros(99), 100, 0.5)}, r"element 99 of argument 1 .*line 16 of the PTX"),
    "kind of n": ({"args": (X, X, 3.5, 0.5)}, r"argument 2 \(n\) is float; the parameter is .u32: give an int"),
    "kind of x": (
        {"args": (1.5, X, 3, 0.5)},
        r"argument 0 \(x\) is float; the parameter is .u64: give a tensor or an int",
    ),
    "kind of s": ({"args": (X, X, 3, X)}, r"argument 3 \(s\) is Tensor; the parameter is .f32: give a float"),
    "kind of kernel": ({"kernel": 3}, "kernel is int; give a triton.jit function, PTX or CUDA C\\+\\+ source"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    changes, message = REFUSED[what]
    with pytest.raises(DtypeError if what.startswith("kind") else ArgumentError, match=message):
        scaled(**changes)


@pytest.mark.slow
def test_compilers_that_are_missing_are_named(tmp_path):
    code = (
        "import sys; sys.modules['cuda.bindings'] = sys.modules['triton'] = None\n"
        "import fmtsim\n"
        "from fmtsim.machine.ptx import triton\n"
        "for call in (lambda: fmtsim.launch('__global__ void f() {}', 1), triton.runtime):\n"
        "    try: call()\n"
        "    except fmtsim.errors.DeviceError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert 'pip install "fmtsim[nvrtc]"' in said and 'pip install "fmtsim[triton]"' in said


# CUDA C++

CUDA = """
#include <cuda_bf16.h>
namespace ns {
template <int N> __global__ void scale(const float *x, float *y, int n, __nv_bfloat16 s) {
    int i = blockIdx.x * N + threadIdx.x;
    if (i < n) y[i] = 3.0f * x[i] + __bfloat162float(s);
}
}
extern "C" __global__ void ones(float *y) { y[threadIdx.x] = 1.0f; }
"""


def test_cuda_source(nvrtc):
    y, z = torch.zeros(100), torch.zeros(32)
    record = fmtsim.launch(CUDA, 4, X, y, 100, torch.tensor(0.5, dtype=torch.bfloat16), entry="ns::scale<32>", block=32)
    assert torch.equal(y, (X.double() * 3 + 0.5).float()) and record.kernel == "ns::scale<32>"
    fmtsim.launch(CUDA, 1, z, entry="ones", block=32, use_fast_math=True, fmad=False, std="c++20")
    assert z.eq(1).all()
    called = "__device__ float twice(float x) { return x * 2.0f; }\n__global__ void f(float *y) {\n*y = twice(*y);\n}"
    record = fmtsim.launch(called, 1, z, block=1, watch=3)  # of the function that is called, too
    assert [note.source for note in record.watched][-1] == "kernel.cu:1" and record.watched[-1].values.tolist() == [2.0]
    with pytest.raises(ArgumentError, match=r"(?s)NVRTC cannot compile 'the source'.*expected a declaration"):
        fmtsim.launch(f"{CUDA}!", 1)
    with pytest.raises(ArgumentError, match="unrecognized option --bogus"):
        fmtsim.launch(CUDA, 1, z, entry="ones", block=32, bogus=True)
    with pytest.raises(ArgumentError, match=r"argument 3 .* has 4 bytes; the parameter has 2"):
        fmtsim.launch(CUDA, 4, X, y, 100, torch.tensor(0.5), entry="ns::scale<32>", block=32)


# Triton

if find_spec("triton") is not None:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def affine(x, y, n, s, SIZE: tl.constexpr = 128):
        i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        tl.store(y + i, tl.load(x + i, i < n).to(tl.float32) * s + 1, i < n)

    @triton.jit(do_not_specialize=["n"])
    def pairs(xs, n, other, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        value = tl.load(xs[0] + i, i < n)
        if other is not None:
            value += tl.load(other + i, i < n)
        tl.store(xs[1] + i, value, i < n)

    @triton.jit
    def scalars(y, a: tl.bfloat16, b: tl.float16, c: tl.float64, d, e, f):
        values = (a, b, c, d, e, f)
        for k in tl.static_range(6):
            tl.store(y + k, values[k].to(tl.float32))

    @triton.jit
    def boxes(source, y, SIZE: tl.constexpr):
        tile = source.load([SIZE, 0])
        i = tl.arange(0, SIZE)
        tl.store(y + i[:, None] * SIZE + i[None], tile)

    @triton.jit
    def summed(x, y, SIZE: tl.constexpr):
        total = tl.sum(tl.load(x + tl.arange(0, SIZE)))
        tl.store(y, total)


def after(kernel, *args, grid=(1,), **named) -> tuple[torch.Tensor, "fmtsim.machine.ptx.launching.Launch"]:
    y = torch.zeros(100)
    return y, fmtsim.launch(kernel, grid, X, y, *args, **named)


@needs_triton
def test_a_triton_function_is_specialised_as_by_its_launcher():
    want = X * 2 + 1  # exact: 2 x has no rounding
    y, record = after(affine, 100, 2.0, grid=lambda meta: (triton.cdiv(meta["n"], meta["SIZE"]),), num_warps=2)
    assert torch.equal(y, want) and record.block == (64, 1, 1) and record.grid == (1, 1, 1) and record.exact
    y, other = after(affine, n=96, s=2.0, SIZE=32, grid=(3,))
    assert torch.equal(y[:96], want[:96]) and not y[96:].any()
    # four elements at once where 16 divides the number and the address
    wide = {"SIZE": 512, "num_warps": 1}
    assert ".v4." in after(affine, 96, 2.0, **wide)[1].ptx and ".v4." not in after(affine, 100, 2.0, **wide)[1].ptx
    y = torch.zeros(100)
    view = fmtsim.launch(affine, 1, X[1:], y[1:], 96, 2.0, **wide)
    assert torch.equal(y[1:97], want[1:97]) and ".v4." not in view.ptx
    y, record = after(affine, 1, 2)  # ones and ints are constants, 1 has no parameter
    assert torch.equal(y[:1], want[:1]) and record.ptx.count(".param") < view.ptx.count(".param")
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.int64, torch.float8_e5m2):
        y = torch.zeros(100)
        fmtsim.launch(affine, 1, X.to(dtype), y, 100, 2.0)
        assert torch.equal(y, X.to(dtype).float() * 2 + 1), dtype
    assert fmtsim.launch(affine, 1, X.to(torch.bool), y, 100, 2.0).exact


@needs_triton
def test_watched_values():
    x, y = torch.arange(512.0), torch.zeros(1)
    record = fmtsim.launch(summed, 1, x, y, SIZE=512, num_warps=2, watch="total", watch_threads=(0, 1))
    adds = [note.values.tolist() for note in record.watched if note.instruction.startswith("add.f32")]
    # two loads of four neighbours, whose sums are exact; then the other lanes, and the other warp's
    assert adds[:3] == [[1.0, 9.0], [3.0, 15.0], [6.0, 22.0]] and adds[6] == [1036.0, 1068.0]
    assert adds[-1][0] == y.item() == 511 * 256 and len(adds) == 7 + 5 + 1
    line = summed.fn.__code__.co_firstlineno + 2
    again = fmtsim.launch(summed, 1, x, y, SIZE=512, num_warps=2, watch=line, watch_block=0, watch_threads=1)
    assert [note.values.tolist() for note in again.watched if note.instruction.startswith("add.f32")][0] == [9.0]
    assert "standard.py:" in str(record) and "1036, 1068" in str(record)
    for options, message in (
        ({"watch": "y"}, "watch='y' is not assigned in the kernel"),
        ({"watch": 1}, r"test_launch.py:1, of which no instruction is left in the PTX; it has .*test_launch.py"),
        ({"watch": "total", "watch_block": (1,)}, r"watch_block=\(1, 0, 0\) is not in the grid \(1, 1, 1\)"),
        ({"watch": 1.5}, "watch=1.5 is not assigned in the kernel"),
        ({"watch": "total", "watch_threads": "0"}, r"watch_threads=\('0',\); give an int or several"),
        ({"watch": "total", "watch_threads": [-1, 64]}, r"watch_threads=\[-1, 64\]; a block has 64 threads"),
    ):
        with pytest.raises(ArgumentError, match=message):
            fmtsim.launch(summed, 1, x, y, SIZE=512, num_warps=2, **options)


@needs_triton
def test_tuples_none_and_tensor_descriptors():
    y = torch.zeros(100)
    fmtsim.launch(pairs, 1, (X, y), 100, None, SIZE=128)
    assert torch.equal(y, X)
    fmtsim.launch(pairs, 1, (X, y), 100, other=X, SIZE=128)
    assert torch.equal(y, 2 * X)
    source, y = torch.arange(4096.0).reshape(128, 32), torch.zeros(32, 32)
    fmtsim.launch(boxes, 1, TensorDescriptor.from_tensor(source, [32, 32]), y, SIZE=32)
    assert torch.equal(y, source[32:64])


@needs_triton
def test_configurations_and_heuristics():
    configs = [triton.Config({"SIZE": 64}, num_warps=1), triton.Config({"SIZE": 128}, num_warps=4)]
    tuned = triton.autotune(configs, key=["n"])(affine)
    assert after(tuned, 100, 2.0)[1].config.endswith("(the first of 2)")
    assert after(tuned, 100, 2.0, config=1)[1].block == (128, 1, 1)
    assert after(tuned, 100, 2.0, config=triton.Config({"SIZE": 32}, num_warps=2))[1].block == (64, 1, 1)
    assert after(tuned, 100, 2.0, config={"SIZE": 32})[1].config == "SIZE=32 (as given)"
    pruned = triton.autotune(configs, key=["n"], prune_configs_by={"early_config_prune": lambda c, *_, **__: c[1:]})
    assert after(pruned(affine), 100, 2.0)[1].block == (128, 1, 1)
    sized = triton.heuristics({"SIZE": lambda args: triton.next_power_of_2(args["n"])})(affine)
    y, _ = after(sized, 100, 2.0)
    assert torch.equal(y, X * 2 + 1)


TRITON = {
    "missing": (lambda: after(affine, 100), r"affine: missing 1 required positional argument: 's'"),
    "unknown": (lambda: after(affine, 1, 2.0, num_warp=2), "no argument 'num_warp', .*did you mean 'num_warps'"),
    "warps": (lambda: after(affine, 1, 2.0, num_warps=3), "affine: num_warps must be a power of 2"),
    "cluster": (lambda: after(affine, 1, 2.0, num_ctas=2), "num_ctas=2; clusters of blocks are not simulated"),
    "type": (lambda: fmtsim.launch(affine, 1, X.to(torch.complex64), X, 3, 2.0), "no type for tensors of 'complex64'"),
    "source": (lambda: after(affine, 100, 2.0, SIZE=100), r"(?s)Triton cannot compile affine: .*must be a power of 2"),
    "range": (lambda: after(affine, 128, 2.0), r"element 100 of argument x, which has 100\)"),
    "device": (lambda: fmtsim.launch(affine, 1, X.to("meta"), X, 3, 2.0), "x is on meta; kernels run on CPU tensors"),
    "twice": (
        lambda: after(triton.autotune([triton.Config({"SIZE": 64})], key=[])(affine), 100, 2.0, SIZE=32),
        "SIZE given, but the configuration gives it, too",
    ),
    "no configuration": (lambda: after(affine, 1, 2.0, config=0), "affine has no @triton.autotune; pass a dict"),
}


@needs_triton
@pytest.mark.parametrize("what", TRITON)
def test_triton_refused(what):
    call, message = TRITON[what]
    with pytest.raises(ArgumentError, match=message):
        call()


@needs_triton
def test_scalars_and_memory_as_the_launcher_passes_them():
    y = torch.zeros(100)
    fmtsim.launch(scalars, 1, y, 1.01171875, 0.1, 0.1, -5, 2**40, True)
    # a bfloat16 is truncated (1.015625 is nearest even), a float16 rounded
    want = [1.0078125, float(torch.tensor(0.1, dtype=torch.float16)), float(torch.tensor(0.1)), -5.0, 2.0**40, 1.0]
    assert y[:6].tolist() == want
    odd = torch.frombuffer(bytearray(404)[4:], dtype=torch.float32, offset=4)
    moved = torch.frombuffer(bytearray(400), dtype=torch.float32, count=90, offset=4)
    reasons = fmtsim.launch(affine, 1, odd, moved, 90, 2.0).reasons
    assert any("begins where 16 does not divide the address" in reason for reason in reasons)
    with fmtsim.simulate() as run:
        fmtsim.launch(affine, 1, X, y, 100, 2.0)
    assert not run.exact  # its own operators are not the model's


@needs_triton
def test_a_vector_of_atomic_sums():
    registers = ", ".join(f"%h{i}" for i in range(8))
    kernel = f"""
    .version 8.7
    .target sm_90
    .address_size 64
    .visible .entry sums(.param .u64 x, .param .u64 y, .param .u64 old)
    .reqntid 1
    {{
        .reg .b16 %h<16>; .reg .b64 %d<4>;
        ld.param.u64 %d1, [x]; ld.param.u64 %d2, [y]; ld.param.u64 %d3, [old];
        ld.global.v4.b16 {{%h0, %h1, %h2, %h3}}, [%d1]; ld.global.v4.b16 {{%h4, %h5, %h6, %h7}}, [%d1+8];
        atom.global.gpu.acq_rel.add.noftz.v8.bf16 {{{registers.replace("%h", "%h1")}}}, [%d2], {{{registers}}};
        st.global.v4.b16 [%d3], {{%h10, %h11, %h12, %h13}};
        st.global.v2.b16 [%d3+8], {{%h14, %h15}};
        ret;
    }}"""
    kernel = kernel.replace("%h16, %h17}", "_, _}")
    x, y = torch.randn(8).to(torch.bfloat16), torch.randn(8).to(torch.bfloat16)
    old, before = torch.zeros(6, dtype=torch.bfloat16), y.clone()
    record = fmtsim.launch(kernel, 1, x, y, old)
    assert torch.equal(y, before + x) and torch.equal(old, before[:6]) and record.exact
    assert not fmtsim.launch(
        kernel.replace("ret;", f"red.global.add.noftz.v8.bf16 [%d2], {{{registers}}}; ret;"), 1, x, y, old
    ).exact
    with pytest.raises(ArgumentError, match="v8.f32 is not an instruction"):
        fmtsim.launch(kernel.replace("add.noftz.v8.bf16", "add.v8.f32"), 1, x, y, old)


@needs_triton
def test_kernels_in_a_simulation():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert x.is_cuda and x.device == triton.runtime.driver.active.get_active_torch_device()
            y = torch.empty(x.shape, device=x.device)
            with torch.cuda.device(x.device):
                affine[lambda meta: (triton.cdiv(meta["n"], meta["SIZE"]),)](x, y, x.numel(), 2.0)
            return y

        @staticmethod
        def backward(ctx, gradient):
            z = torch.empty_like(gradient)
            affine[(1,)](gradient.contiguous(), z, z.numel(), 3.0)
            return z

    @torch.library.triton_op("fmtsim_tests::twice", mutates_args={})
    def twice(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(affine)[(1,)](x, y, x.numel(), 2.0)
        return y

    x = X.clone().requires_grad_()
    with fmtsim.simulate(strict=True) as run:
        y = Double.apply(x)
        y.sum().backward()
        z = twice(X)
        # libraries keep what was compiled, and call its launcher
        kept, again = affine[(1,)](X, z, 100, 2.0), torch.zeros(100)
        kept.run(1, 1, 1, 0, kept.function, kept.packed_metadata, None, None, None, X, again, 100, 2.0, 128)
        affine[(0,)](X, X, 0, 2.0)  # Triton's launcher starts nothing
        properties = torch.cuda.get_device_properties(0)
        assert (properties.multi_processor_count, torch.cuda.get_device_capability()) == (132, (9, 0))
        assert torch.cuda.is_available() and torch.zeros(3, device="cuda").cuda().to("cuda:0").untyped_storage().device
    assert torch.equal(y, X * 2 + 1) and torch.equal(z, y) and x.grad is not None and x.grad.eq(4).all()
    assert run.exact["affine (kernel)"] == 5 and "affine (kernel) 5" in run.summary and torch.equal(again, y)
    assert not x.is_cuda and not hasattr(torch.cuda.is_available, "__wrapped__")


# Compiled graphs


LIBRARY = """
class Op(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        seen.append((g.device.type, ctx.saved_tensors[0].is_cuda))
        return g
"""


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda x, y: y.backward(),
        lambda x, y: y.backward(torch.ones(()), inputs=[x]),
        lambda x, y: y.backward(gradient=torch.ones(())),
        lambda x, y: torch.autograd.backward([y], [torch.ones(())]),
        lambda x, y: torch.autograd.grad(y, x),
    ],
)
def test_a_library_s_backward_pass_sees_a_gpu(differentiate):
    scope = {"__name__": "library.ops", "torch": torch, "triton": None, "seen": []}
    exec(LIBRARY, scope)
    x = torch.ones((), requires_grad=True)
    with fmtsim.simulate(target="h100"):
        differentiate(x, scope["Op"].apply(x))
    assert scope["seen"] == [("cuda", True)]
    differentiate(x, scope["Op"].apply(x))
    assert scope["seen"][1:] == [("cpu", False)]


STEP = Path(__file__).parents[1] / "data/h100_gpt2_step.zip"


@needs_triton
@pytest.mark.parametrize("kind", ["bf16_sdpa", pytest.param("fp32_formula", marks=pytest.mark.slow)])
def test_a_gpu_s_training_step(kind, tmp_path):
    # a GPT of two layers: torch.compile's forward and backward graphs, joined
    with zipfile.ZipFile(STEP) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith(kind)])
    case = json.loads((tmp_path / kind / "step.json").read_text())
    rng, tensors = np.random.default_rng(7), {}
    for name, shape in case["parameters"]:
        numbers = rng.integers(-2_048, 2_048, size=(4, *shape)).sum(0) / 2_048 / 16 + (
            "ln" in name and "weight" in name
        )
        tensors[name] = torch.from_numpy(numbers).float().to(getattr(torch, case["dtype"])).requires_grad_()
    batch, length, words = case["batch"]
    ids = torch.from_numpy(rng.integers(0, words, size=(batch, length + 1)))
    tensors |= {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    with fmtsim.simulate(target="h100", compiled=tmp_path / kind / "cache") as run:
        step = run.graphs["0_forward"].with_backward(run.graphs["0_backward"])
        loss, logits = step(*(tensors[name] for name in case["inputs"]))
        loss.backward()
    found = {"loss": loss, "logits": logits} | {f"grad {name}": tensors[name].grad for name, _ in case["parameters"]}
    codes = {name: x.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for name, x in found.items()}
    hashes = {name: sha256(code.tobytes()).hexdigest() for name, code in codes.items()}
    assert {name: hashes[name] for name in case["repeats"] if name in hashes} == {
        name: code for name, code in case["sha256"].items() if name in case["repeats"]
    }
    assert len(case["sha256"]) == 31 and not run.unknown


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Iterator[dict[str, tuple[str, list[torch.Tensor]]]]:
    """Cache folders of six functions as a GPU wrote them, with their arguments and result."""
    root, found = tmp_path_factory.mktemp("inductor"), {}
    with zipfile.ZipFile(INDUCTOR) as archive:
        for name in sorted(archive.namelist()):
            function, _, file = name.partition("/")
            folder, tensors = found.setdefault(function, (str(root / function), []))
            if file.startswith("files/"):
                inner, _, plain = file.removeprefix("files/").partition("_")
                place = root / function / ("triton/0" if len(inner) > 10 else "") / inner / plain
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(archive.read(name))
            else:
                _, dtype, sizes = file.split(".")
                flat = torch.frombuffer(bytearray(archive.read(name)), dtype=getattr(torch, dtype))
                tensors.append(flat.reshape([int(n) for n in sizes.split("x") if n]))
    yield found
    shutil.rmtree(root)


@needs_golden
@needs_triton
@pytest.mark.parametrize("function", [
    "rms", "sum", *(pytest.param(name, marks=pytest.mark.slow) for name in ("softmax", "swiglu", "ce", "ln")),
])  # fmt: skip
def test_a_gpu_s_graphs(caches, function):
    folder, (*inputs, want) = caches[function]
    with fmtsim.simulate(target="h100", strict=True, compiled=folder) as run:
        (graph,) = run.graphs.values()
        (y,) = graph(*inputs)
    assert torch.equal(y, want) and run.exact.total() >= 1
    with pytest.raises(ArgumentError, match="was compiled for other inputs|takes . inputs"), run:
        graph(*(x[:7] for x in inputs))


@needs_golden
@needs_triton
def test_a_cache_with_another_kernel_is_not_exact(caches, tmp_path):
    shutil.copytree(caches["rms"][0], tmp_path / "cache")
    (file,) = (tmp_path / "cache").rglob("*.ptx")
    file.write_text(file.read_text().replace("rsqrt.approx", "sqrt.approx"))
    *inputs, want = caches["rms"][1]
    with fmtsim.simulate(target="h100", compiled=tmp_path / "cache") as run:
        (y,) = run.graphs["1_inference"](*inputs)
    assert not torch.equal(y, want) and "by this torch's heuristics, whose PTX is another" in run.summary


@needs_golden
@needs_triton
def test_a_cache_that_misses_its_kernels(caches, tmp_path):
    shutil.copytree(caches["rms"][0], tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache/triton")
    with (
        fmtsim.simulate(compiled=tmp_path / "cache") as run,
        pytest.raises(DataError, match="no PTX of triton_per_fused"),
    ):
        next(iter(run.graphs.values()))(*caches["rms"][1][:-1])
    with pytest.raises(DataError, match="has no graphs of torch.compile; give a TORCHINDUCTOR_CACHE_DIR"):
        fmtsim.simulate(compiled=tmp_path / "cache/0")


@needs_golden
@needs_triton
@pytest.mark.slow
def test_graphs_that_are_generated_here(caches):
    functional = torch.nn.functional
    functions = {
        "softmax": lambda x: torch.softmax(x, -1),
        "rms": lambda x, w: functional.rms_norm(x, (1000,), w),
        "ce": lambda x, t: functional.cross_entropy(x.float(), t),
        "ln": lambda x, w: functional.layer_norm(x, (1000,), w),
    }
    for name, function in functions.items():
        *inputs, want = caches[name][1]
        with fmtsim.simulate(target="h100", strict=True) as run:
            y = run.compile(function)(*inputs)
        assert torch.equal(y, want), name
    with fmtsim.simulate() as run, pytest.raises(ArgumentError, match="a graph with gradients is not compiled"):
        run.compile(torch.nn.Linear(4, 4))(torch.ones(4, 4))
