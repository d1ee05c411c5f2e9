"""report: which layers of a model are converted, to what, and why the others are not."""

import dataclasses
from dataclasses import dataclass

from torch import nn

from fmtsim.arguments import check_module
from fmtsim.nn.attention import EmulatedMultiheadAttention
from fmtsim.nn.convert import NOTES, REASONS
from fmtsim.nn.modules import EmulatedModule, emulated_types
from fmtsim.nn.planning import why_not
from fmtsim.nn.swaps import FILTERED, plain_class, swap_details
from fmtsim.table import ruled


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """Describe one module: its name and type, and its quantisers or the reason for having none."""

    name: str
    type: str
    converted: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """List the modules of a model that hold parameters or could be converted; ``print`` shows a table.

    Args:
        rows: The modules.
        notes: What the recipe would exchange and the model does not have.
    """

    rows: tuple[ReportRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[ReportRow, ...]:
        """The rows of converted modules."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def left_alone(self) -> tuple[ReportRow, ...]:
        """The rows of the other modules."""
        return tuple(row for row in self.rows if not row.converted)

    def __str__(self) -> str:
        cells = [("layer", "type", "converted", "quantisers, or why not")]
        cells += [(row.name, row.type, "yes" if row.converted else "no", row.detail) for row in self.rows]
        total = f"{len(self.converted)} of {len(self.rows)} converted; products called as functions are not seen"
        return "\n".join((*ruled(cells), *self.notes, total))


def report(model: nn.Module) -> Report:
    """Return what ``convert`` did to a model, or, before it, what it could not convert and why.

    A module that is used under several names has a row for each.

    Raises:
        ArgumentError: ``model`` is no module.
    """
    check_module("report", model)
    known = model.__dict__.get(REASONS, {})
    first: dict[nn.Module, str] = {}
    inside = {  # an attention module multiplies with this layer's weights itself
        module.out_proj: name
        for name, module in model.named_modules()
        if isinstance(module, EmulatedMultiheadAttention)
    }
    rows = []
    for name, module in model.named_modules(remove_duplicate=False):
        own = next(module.parameters(recurse=False), None) is not None or isinstance(module, emulated_types())
        if not own and not swap_details(module) and known.get(name) != FILTERED:
            continue
        row = _row(name or "(model)", module, known.get(name))
        if module in inside:
            detail = f"as a part of {inside[module] or '(model)'}"
            row = dataclasses.replace(row, converted=True, detail=detail)
        if module in first:
            row = dataclasses.replace(row, detail=f"same module as {first[module]}")
        first.setdefault(module, row.name)
        rows.append(row)
    return Report(rows=tuple(rows), notes=model.__dict__.get(NOTES, ()))


def _row(name: str, module: nn.Module, reason: str | None) -> ReportRow:
    details = swap_details(module)
    cls = plain_class(module)
    if isinstance(module, EmulatedModule):
        details = [*([] if module.emulation is None else [str(module.emulation.config)]), *details]
    elif not details:
        return ReportRow(
            name=name, type=cls.__name__, converted=False, detail=reason or why_not(module) or "not converted"
        )
    return ReportRow(name=name, type=cls.__name__, converted=True, detail="; ".join(details))
