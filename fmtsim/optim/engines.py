"""Which engine does a step: fused kernels where they cover a scheme, torch operations elsewhere, equal bits both."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmtsim.optim.rules import Rule
from fmtsim.optim.single import Job
from fmtsim.optim.state import Scheme


def run(jobs: Sequence[Job], rule: Rule, scheme: Scheme, counter: Callable[[torch.device], Tensor]) -> Sequence[Job]:
    """Do the jobs that kernels cover; return the others."""
    return jobs


def forget(optimizer: Any) -> None:
    """Drop what engines remember of an optimizer whose state tensors were replaced."""
