"""observe: collect statistics of every operand of a converted model while it runs."""

import math
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from fmtsim.analysis.stats import OperandStats
from fmtsim.arguments import check_module
from fmtsim.errors import ArgumentError
from fmtsim.gemm.layers.passes import Observer
from fmtsim.nn.attention_mode import ATTENTION
from fmtsim.nn.modules import EmulatedModule
from fmtsim.spec.quantizer import Quantizer
from fmtsim.table import ruled


class Observation:
    """Statistics per layer and operand: ``stats["layers.0.fc"]["g_w"].underflow_percent``; ``print`` shows a table.

    Operands are named by tensor and product: ``x_f w_f`` enter fprop, ``g_d w_d`` dgrad, ``g_w x_w`` wgrad; those of
    quantised attention are ``q k v p``, and ``dv.a`` ... ``dk.b`` where gradients have quantisers. Several
    calls inside the ``with`` add up. Use ``fmtsim.observe`` to make one.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module("observe", model)
        self._modules = [module for module in model.modules() if isinstance(module, EmulatedModule)]
        self._attention = [m.__dict__[ATTENTION] for m in model.modules() if ATTENTION in m.__dict__]
        self._active = False
        self.layers: dict[str, dict[str, OperandStats]] = {}
        if not self._modules and not self._attention:
            raise ArgumentError(
                f"observe found no converted layer in {type(model).__name__}; call fmtsim.convert first"
            )

    @classmethod
    def of(cls, layers: dict[str, dict[str, OperandStats]]) -> "Observation":
        """Return finished statistics, of no model."""
        found = cls.__new__(cls)
        found._modules, found._attention, found._active, found.layers = [], [], False, layers
        return found

    def __enter__(self) -> "Observation":
        emulations = [module.emulation for module in self._modules if module.emulation is not None]
        watched = [(how.name, how.observer) for how in emulations]
        for name, observer in watched + [(attended.name, attended.call.observer) for attended in self._attention]:
            if observer is not None:
                raise ArgumentError(f"layer {name!r} is observed already; leave the outer observe first")
        for how in emulations:
            how.observer = lambda part, name=how.name: self._observer(".".join(filter(None, (name, part))))  # type: ignore[misc]
        for attended in self._attention:
            attended.call.observer = self._observer(attended.name)
        self._active = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._active = False  # graphs made inside may still run backward; they are no longer counted
        for module in self._modules:
            if module.emulation is not None:
                module.emulation.observer = None
        for attended in self._attention:
            attended.call.observer = None

    def __getitem__(self, layer: str) -> dict[str, OperandStats]:
        return self.layers[layer]

    def __str__(self) -> str:
        cells = [("layer", "operand", "format", "underflow %", "saturation %", "SQNR dB", "amax")]
        for layer, operands in self.layers.items():
            for operand, s in operands.items():
                ratio = "lossless" if s.sqnr_db == math.inf else "-" if math.isnan(s.sqnr_db) else f"{s.sqnr_db:.1f}"
                lost = (f"{s.underflow_percent:.2f}", f"{s.saturation_percent:.3f}", ratio, f"{s.amax:.3g}")
                cells.append((layer or "(model)", operand, s.format, *lost))
        return "\n".join(ruled(cells, left=range(3)))

    def to_dict(self) -> dict[str, Any]:
        """Return layer -> operand -> figures as JSON types."""
        return {name: {op: s.to_dict() for op, s in operands.items()} for name, operands in self.layers.items()}

    def _observer(self, layer: str) -> Observer:
        def record(operand: str, x: Tensor, q: Tensor, quantizer: Quantizer, dim: int) -> None:
            if self._active:
                stats = self.layers.setdefault(layer, {}).setdefault(operand, OperandStats())
                stats.add(x, q, quantizer.format, dim)

        return record


def observe(model: nn.Module) -> Observation:
    """Collect statistics of every operand of a converted model: ``with observe(model) as stats: ...``.

    Forward and backward inside the ``with`` are counted; outside it a converted model pays nothing. Under activation
    checkpointing the recomputed forward counts again. Compiled code is not seen and raises an error.

    Raises:
        ArgumentError: no layer is converted, or the model is observed already.
    """
    return Observation(model)
