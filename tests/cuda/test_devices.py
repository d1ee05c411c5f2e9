# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: every call runs where its tensors are, whatever the current device, stream or thread."""

import threading

import pytest
import torch

import fmtsim
import fmtsim.cuda
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not fmtsim.cuda.available(),
    reason="needs two GPUs that the engine runs on",
)

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("format", ["e4m3", "nvfp4", "nf4_g64"])
def test_casts_run_on_the_device_of_the_tensor(current, format):
    x = numbers(64, 256)
    wanted = fmtsim.quantize(x, format)
    with torch.cuda.device(current):
        for device in (FIRST, SECOND, FIRST):
            got = fmtsim.quantize(x.to(device), format)
            assert got.device == device and torch.cuda.current_device() == current
            assert_same_bits(got, wanted)
            encoded = fmtsim.encode(x.to(device), format)
            assert_same_bits(encoded.decode(), wanted)
            key = {"rounding": "stochastic", "generator": 7}
            assert_same_bits(fmtsim.quantize(x.to(device), format, **key), fmtsim.quantize(x, format, **key))


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("unit", ["hopper.wgmma", "fp32_fma", "int8"])
def test_products_run_on_the_device_of_the_operands(current, unit):
    if unit == "int8":
        a, b = numbers(33, 64).round().to(torch.int8), numbers(64, 40, seed=1).round().to(torch.int8)
    else:
        dtype = torch.float32 if unit == "fp32_fma" else torch.bfloat16
        a, b = numbers(33, 64).to(dtype), numbers(64, 40, seed=1).to(dtype)
    wanted = fmtsim.mm(a, b, target=unit)
    with torch.cuda.device(current):
        for device in (SECOND, FIRST):
            got = fmtsim.mm(a.to(device), b.to(device), target=unit)
            assert got.device == device and torch.equal(got.cpu(), wanted)


def test_the_current_stream_of_the_other_device_is_taken():
    x = numbers(1000).to(SECOND)
    fmtsim.quantize(x, "e4m3")
    stream = torch.cuda.Stream(SECOND)
    torch.cuda.synchronize(SECOND)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x += 1  # late: a launch on another stream would not see it
        with torch.cuda.device(FIRST):
            got = fmtsim.quantize(x, "e4m3")
    torch.cuda.synchronize(SECOND)
    assert_same_bits(got, fmtsim.quantize(x.cpu(), "e4m3"))


def test_backward_runs_in_threads_of_both_devices():
    w = numbers(64, 64, seed=2)
    grads = []
    for device in (torch.device("cpu"), FIRST, SECOND):
        x = numbers(8, 64).to(device).requires_grad_()
        y = fmtsim.linear(x, w.to(device), target="fp32_fma")
        fmtsim.quantize(y, "e4m3").square().sum().backward()
        grads.append(x.grad)
    assert_same_bits(grads[1], grads[0])
    assert_same_bits(grads[2], grads[0])


def test_threads_of_two_devices_do_not_disturb_each_other():
    x = numbers(4096)
    wanted = fmtsim.quantize(x, "e4m3")
    wrong = []

    def work(device):
        own = x.to(device)
        for _ in range(200):
            if not torch.equal(fmtsim.quantize(own, "e4m3").cpu(), wanted):
                wrong.append(device)

    threads = [threading.Thread(target=work, args=(device,)) for device in (FIRST, SECOND) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_graphs_are_captured_on_the_second_device():
    x = numbers(64, 256).to(SECOND)
    with torch.cuda.device(SECOND):
        for _ in range(2):
            fmtsim.quantize(x, "mxfp8_e4m3")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fmtsim.quantize(x, "mxfp8_e4m3")
        x.mul_(3)
        graph.replay()
    assert_same_bits(got, fmtsim.quantize(x.cpu(), "mxfp8_e4m3"))


def test_warmup_of_the_second_device_leaves_the_current_one():
    assert fmtsim.cuda.warmup(SECOND) > 0 and torch.cuda.current_device() == 0
