# SPDX-License-Identifier: Apache-2.0
"""The cases of ``python -m benchmarks.suite simulate``: models in bfloat16 under ``simulate``, against plain torch."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite.timing import clock_of, in_turns
from fmtsim.machine.simulate import simulate
from fmtsim.support.errors import FmtsimError


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name a model of transformers with random weights, its input, and the seconds that a run may take."""

    name: str
    config: str
    sizes: dict[str, int]
    batch: tuple[int, int]  # sequences, tokens of each
    target: float  # seconds on two cores
    backward: bool = False

    def action(self) -> Callable[[], Any]:
        """Return what runs the model, or the layers alone where nothing asks for a loss.

        Raises:
            FmtsimError: transformers is not installed.
        """
        try:
            import transformers
        except ImportError:
            raise FmtsimError("transformers is not installed; pip install 'fmtsim[transformers]'") from None
        config = getattr(transformers, f"{self.config}Config")(**self.sizes, use_cache=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).bfloat16().eval()
            tokens = torch.randint(0, config.vocab_size, self.batch)

        def run() -> Tensor:
            with torch.set_grad_enabled(self.backward):
                logits: Tensor = model(tokens).logits
                if self.backward:
                    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
                    model.zero_grad()
            return logits

        return run


_LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "vocab_size": 32000,
}  # fmt: skip
_QWEN3 = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 1, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 64,
}  # fmt: skip
CASES = (
    Case(name="llama 1024 x 8 layers", config="Llama", sizes=_LLAMA, batch=(4, 512), target=10),
    Case(name="gpt2", config="GPT2", sizes={}, batch=(1, 128), target=5),
    Case(name="gpt2 with backward", config="GPT2", sizes={}, batch=(1, 128), target=15, backward=True),
    Case(name="one layer of qwen3-4b", config="Qwen3", sizes=_QWEN3, batch=(1, 250), target=240 / 36),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold the median seconds of a case and of plain torch, in turns, and the processor's seconds of one run."""

    case: Case
    seconds: float
    plain_seconds: float
    processor_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as long as plain torch a simulation takes."""
        return self.seconds / self.plain_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "case": self.case.name, "ratio": self.ratio, "seconds": self.seconds, "plain_seconds": self.plain_seconds,
            "processor_seconds": self.processor_seconds, "target": self.case.target,
        }  # fmt: skip


def measure(case: Case, repeats: int) -> Result:
    """Return the result of one case."""
    run = case.action()

    def simulated() -> None:
        with simulate(target="h200"):
            run()

    clock = clock_of(torch.get_num_threads())
    seconds, plain_seconds = in_turns((simulated, run), repeats, 1, clock)
    start = time.process_time()
    simulated()
    return Result(
        case=case, seconds=seconds, plain_seconds=plain_seconds, processor_seconds=time.process_time() - start
    )
