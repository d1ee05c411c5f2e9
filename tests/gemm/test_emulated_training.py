# SPDX-License-Identifier: Apache-2.0
"""EmulatedGEMM on machines inside torch: gradients, autocast, torch.compile, checkpoints, processes, statistics."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fmtsim
from fmtsim import Datapath, EmulatedGEMM, Gemm, GemmPlan, LinearConfig, Quantizer, get_format, linear_config
from fmtsim.formats.block import scaled
from tests.support.bits import assert_same_bits
from tests.support.operands import normal

STOCHASTIC = Datapath(block=8, fraction_bits=12, accumulator="bf16", rounding="stochastic")


def tensors(t=32, k=48, n=64, dtype=torch.float32):
    x, w, b = normal(t, k, seed=1).to(dtype), normal(n, k, seed=2).to(dtype), normal(n, seed=3).to(dtype)
    return [v.requires_grad_() for v in (x, w, b)], normal(t, n, seed=4).to(dtype)


def step(function, *arguments):
    leaves, g = tensors()
    y = function(*leaves, *arguments)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def every(fmt, **machine):
    return linear_config(x=fmt, w=fmt, g=fmt, **machine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("machine", [{}, {"target": "hopper.wgmma"}, {"target": "h200"}], ids=["none", "unit", "gpu"])
def test_autocast_casts_first_as_linear_does(dtype, machine):
    config = every("e4m3_tensor", **machine)
    (x, w, b), g = tensors()
    with torch.autocast("cpu", dtype):
        y = EmulatedGEMM.apply(x, w, b, config)
    grads = torch.autograd.grad(y, (x, w, b), g.to(dtype))
    low = [t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
    z = EmulatedGEMM.apply(*low, config)
    assert_same_bits(y.detach(), z.detach())
    assert [t.dtype for t in (y, *grads)] == [dtype] + [torch.float32] * 3
    for got, expected in zip(grads, torch.autograd.grad(z, low, g.to(dtype)), strict=True):
        assert_same_bits(got, expected.float())  # as linear's gradients are


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_rounded_as_those_of_linear(dtype):
    """Of whole numbers, whose sums are exact: torch's own layer rounds each gradient to autocast's dtype, once."""
    results, sizes = [], ((32, 48), (64, 48), (64,), (32, 64))
    for multiply in (F.linear, lambda *tensors: EmulatedGEMM.apply(*tensors, LinearConfig())):
        source = torch.Generator().manual_seed(1)
        x, w, b, g = (torch.randint(-64, 65, size, generator=source).float() for size in sizes)
        leaves = [t.requires_grad_() for t in (x, w, b)]
        with torch.autocast("cpu", dtype):
            y = multiply(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, g.to(dtype))])
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)
    assert not torch.equal(results[0][2], g.T @ x.detach())


ROW = scaled(get_format("e4m3"), (1, None))
SEEDED = linear_config(x="e4m3_tensor", w="e4m3_tensor", g="e5m2_tensor", rounding="stochastic",
                       grad_rounding="stochastic", target="hopper.wgmma")  # fmt: skip
COMPILED = {
    "no unit": linear_config(x=ROW, w="e3m4", g="mxfp8_e5m2", grad_rounding="stochastic"),
    "unit": every("bf16", target="hopper.wgmma"),
    "tensor": every("e4m3_tensor", target="h200"),
    "row": every(ROW, target="hopper.wgmma"),
    "mx": every("mxfp6_e2m3", target="blackwell.tcgen05.mxf8f6f4"),
    "nvfp4": every("nvfp4", target="blackwell.tcgen05.nvf4"),
    "blocks": linear_config(x="e4m3_1x128", w="e4m3_128x128", g="e4m3_1x128", target="hopper.wgmma"),
    "seeded": SEEDED,
    "stochastic sums": every("bf16", target=STOCHASTIC),
    "output": LinearConfig(fprop=Gemm(target="fp32_fma", plan=GemmPlan(k_tile=16, split=2),
                                      out=Quantizer(format=get_format("e4m3")))),
}  # fmt: skip


# torch 2.13's own tracer instantiates autograd.Function, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::fmtsim.support.errors.PlanUnknownWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_into_one_graph_with_the_bits_of_eager(name):
    torch._dynamo.reset()
    config = COMPILED[name]
    compiled = torch.compile(lambda *t: EmulatedGEMM.apply(*t, config, 5), fullgraph=True, backend="aot_eager")
    for got, expected in zip(step(compiled), step(EmulatedGEMM.apply, config, 5), strict=True):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "config",
    [SEEDED, every("bf16", target=STOCHASTIC), linear_config(x="e4m3", w=None, g=None, rounding="stochastic")],
    ids=["operands", "sums", "no unit"],
)
def test_checkpointing_repeats_its_draws(config, reentrant):
    (x, w, _), _ = tensors()

    def layers(x):
        return EmulatedGEMM.apply(EmulatedGEMM.apply(x, w, None, config).tanh(), w.t().contiguous(), None, config)

    config = LinearConfig(fprop=config.fprop)  # what backward draws after a recomputation is another matter
    g = normal(32, 48, seed=5)
    torch.manual_seed(11)
    expected = torch.autograd.grad(layers(x), x, g)[0]
    torch.manual_seed(11)
    checkpoint(layers, x, use_reentrant=reentrant).backward(g)
    assert_same_bits(x.grad, expected)


@pytest.mark.parametrize("config", [*COMPILED.values(), every(None, target="h200", fast_accum=True)])
def test_configs_are_values_that_can_be_sent(config):
    for again in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert again == config and hash(again) == hash(config) and str(again) == str(config)


def test_tensors_with_gradients_reach_all_threads_of_the_engine():
    """Sizes at which the CPU engine divides a tensor of one scale among threads, whose gradient mode is their own."""
    threads = fmtsim.get_num_threads()
    fmtsim.set_num_threads(2)
    try:
        tensor = fmtsim.get_format("e4m3_tensor")
        config = linear_config(x=tensor, w=tensor, g=tensor)
        x, w = torch.randn(64, 64, 512, requires_grad=True), nn.Parameter(torch.randn(512, 512))
        y = EmulatedGEMM.apply(x, w, None, config)
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        fmtsim.set_num_threads(1)
        again = EmulatedGEMM.apply(x, w, None, config)
        assert torch.equal(y, again)
        assert all(map(torch.equal, (dx, dw), torch.autograd.grad(again.sum(), (x, w))))
        fmtsim.set_num_threads(2)
        assert torch.equal(torch.autograd.grad(fmtsim.quantize(w, tensor).sum(), w)[0], torch.ones_like(w))
    finally:
        fmtsim.set_num_threads(threads)
