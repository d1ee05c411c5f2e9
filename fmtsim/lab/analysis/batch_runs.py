# SPDX-License-Identifier: Apache-2.0
"""Run a model again and again on one batch, and get at its loss and its logits."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fmtsim.casts.arguments import takes
from fmtsim.lab.analysis.operand_probe import Backward, Probe
from fmtsim.ptq.calibrate import call
from fmtsim.support.errors import ArgumentError, shown


class Runs:
    """Run a model on one batch, from the same random state each time.

    Args:
        model: The model.
        batch: As ``attribute`` takes it.
        loss: Likewise.
        logits: Likewise.

    Attributes:
        parameters: Those whose gradients count.
        forwards: Passes so far.
        backwards: Likewise.
        why_no_kl: Why there are no logits, empty where there are some.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Any, logits: Any) -> None:
        self.model, self._batch, self._loss, self._logits = model, batch, loss, logits
        found = [p for p in model.parameters() if p.is_floating_point()]
        if not any(p.requires_grad for p in found):  # a model that is used, not trained
            model.requires_grad_()
        self.parameters = [p for p in found if p.requires_grad]
        self.forwards = self.backwards = 0
        self.why_no_kl = ""
        self._devices = sorted({p.device.index for p in found if p.device.type == "cuda"})

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """Return loss and logits of a forward pass."""
        self.forwards += 1
        with torch.random.fork_rng(self._devices):
            output = call(self.model, self._batch, kind="batch")
            return self._loss_of(output), self._logits_of(output)

    def measure(self, reference: Tensor | None) -> tuple[float, float | None]:
        """Return the loss, and the KL from a reference, of a pass without gradients."""
        with torch.no_grad():
            loss, logits = self.forward()
            return loss.item(), None if reference is None or logits is None else kl_of(logits, reference).item()

    def backward(self, probe: Probe, loss: Tensor, kind: Backward, *, again: bool = False) -> list[Tensor | None]:
        """Return the gradients of the parameters, float32 or wider."""
        self.backwards += 1
        for p in self.model.parameters():
            p.grad = None
        probe.backward(loss, kind, again=again)
        return [None if p.grad is None else _dense(p.grad) for p in self.parameters]

    @property
    def samples(self) -> int:
        """Rows of the batch: the first size of its first tensor."""
        batch = self._batch
        if not isinstance(batch, Tensor | Mapping | tuple | list):
            raise ArgumentError(
                f"batch={shown(batch)} is not a batch; pass a tensor, a tuple of arguments or a dict of keywords"
            )
        values = batch.values() if isinstance(batch, Mapping) else batch
        tensors = [values] if isinstance(values, Tensor) else [t for t in values if isinstance(t, Tensor)]
        return next((t.shape[0] for t in tensors if t.dim() and t.shape[0]), 1)

    def _loss_of(self, output: Any) -> Tensor:
        if self._loss is None:
            found = output if isinstance(output, Tensor) else _field(output, "loss")
            if not isinstance(found, Tensor) or found.numel() != 1:
                raise ArgumentError(
                    f"the model returned {_described(output)}, in which there is no loss; "
                    "pass loss=lambda output: ..., a number that gradients go through"
                )
        elif takes(self._loss, output):
            found = self._loss(output)
        else:
            found = self._loss(output, self._batch)
        if not isinstance(found, Tensor) or found.numel() != 1 or (torch.is_grad_enabled() and not found.requires_grad):
            raise ArgumentError(
                f"loss= returned {_described(found)}; return a tensor with one number that gradients go through"
            )
        return found.reshape(())

    def _logits_of(self, output: Any) -> Tensor | None:
        found = _field(output, "logits") if self._logits is None else self._logits(output)
        usable = isinstance(found, Tensor) and found.is_floating_point() and found.dim() > 1 and found.shape[-1] > 1
        if usable and (found.requires_grad or not torch.is_grad_enabled()):
            return found  # type: ignore[no-any-return]
        if self._logits is not None:
            raise ArgumentError(
                f"logits= returned {_described(found)}; return [..., classes], two or more, that gradients go through"
            )
        self.why_no_kl = (
            f"no KL: the model returns {_described(output)}, and whether that holds logits cannot be told; "
            "pass logits=lambda output: ..."
        )
        return None


def kl_of(logits: Tensor, reference: Tensor) -> Tensor:
    """Return the mean over positions of ``KL(softmax(reference) || softmax(logits))`` in nats."""
    p, q = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (reference, logits))
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def _dense(grad: Tensor) -> Tensor:
    dense = grad.to_dense() if grad.layout != torch.strided else grad
    return dense.clone() if dense.dtype == torch.float64 else dense.float()


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _described(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
