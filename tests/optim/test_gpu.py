"""Every scheme and rule on a real device: the bits of the CPU."""

import pytest
import torch

import fmtsim
from tests.support.optim_samples import train

OPTIMIZERS = [(name, "AdamW") for name in fmtsim.optim.list_schemes() if name != "lns_madam"]
OPTIMIZERS += [("lns_madam", "Madam"), ("bnb8", "Adam"), ("bnb8", "Lion"), ("coat", "SGD"), ("fp32", "Madam")]
CASES = [(*pair, torch.bfloat16 if pair[0] == "bf16_sr" else torch.float32) for pair in OPTIMIZERS]
CASES += [(scheme, "AdamW", torch.bfloat16) for scheme in ("fp32", "bnb8", "ao_4bit", "coat", "fp8lm", "intel_2t")]
CASES += [(scheme, "Adam", torch.float16) for scheme in ("bnb8", "deepseek_v3")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(("scheme", "cls", "dtype"), CASES)
def test_gpu_steps_have_the_bits_of_the_cpu(scheme, cls, dtype, bad):
    options = {"lr": 1 / 128, "weight_decay": None, "eps": None, "seed": 11}
    there, here = (
        train(getattr(fmtsim.optim, cls), scheme, 4, bad, dtype, device, **options) for device in ("cuda", "cpu")
    )
    different = [i for i, (a, b) in enumerate(zip(there[0], here[0], strict=True)) if not torch.equal(a, b)]
    assert (different, there[1]) == ([], here[1])
