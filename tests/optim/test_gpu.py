"""Every scheme and rule on a real device: the bits of the CPU."""

import pytest
import torch

import fmtsim
from tests.support.optim_samples import SHAPES, gradients, parameter, value_bits

OPTIMIZERS = [(name, "AdamW") for name in fmtsim.optim.list_schemes() if name != "lns_madam"]
OPTIMIZERS += [("lns_madam", "Madam"), ("bnb8", "Adam"), ("bnb8", "Lion"), ("coat", "SGD"), ("fp32", "Madam")]
CASES = [(*pair, torch.bfloat16 if pair[0] == "bf16_sr" else torch.float32) for pair in OPTIMIZERS]
CASES += [(scheme, "AdamW", torch.bfloat16) for scheme in ("fp32", "bnb8", "ao_4bit", "coat", "fp8lm", "intel_2t")]
CASES += [(scheme, "Adam", torch.float16) for scheme in ("bnb8", "deepseek_v3")]


def train(scheme, cls, device, bad, dtype=torch.float32, steps=4):
    parameters = [
        torch.nn.Parameter(torch.from_numpy(parameter(shape, i)).to(device, dtype)) for i, shape in enumerate(SHAPES)
    ]
    optimizer = getattr(fmtsim.optim, cls)(parameters, lr=1 / 128, state=scheme, seed=11)
    grads = [gradients((8960,), steps, 50 + i) for i in range(len(SHAPES))]
    for step in range(steps):
        for p, g in zip(parameters, grads, strict=True):
            p.grad = torch.from_numpy(g[step][: p.numel()].reshape(p.shape).copy()).to(device, dtype)
            if bad and step == 2:
                p.grad.view(-1)[::999] = torch.nan
        optimizer.step()
    kept = [p.detach().cpu().float() for p in parameters]
    for p in parameters:
        kept += [t.cpu() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return [value_bits(t) for t in kept], optimizer.nonfinite_gradients()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(("scheme", "cls", "dtype"), CASES)
def test_gpu_steps_have_the_bits_of_the_cpu(scheme, cls, dtype, bad):
    there, here = (train(scheme, cls, device, bad, dtype) for device in ("cuda", "cpu"))
    different = [i for i, (a, b) in enumerate(zip(there[0], here[0], strict=True)) if not torch.equal(a, b)]
    assert (different, there[1]) == ([], here[1])
