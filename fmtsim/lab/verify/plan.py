# SPDX-License-Identifier: Apache-2.0
"""Which checks run on which formats."""

from collections.abc import Callable
from functools import partial

from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.lab.verify import checks
from fmtsim.lab.verify.exhaustive import FORMATS, all_inputs
from fmtsim.lab.verify.outcome import Advance, Outcome, Task, task_of
from fmtsim.spec.engine import Casts
from fmtsim.support.errors import FormatError

ORACLE_BITS = 8
CODE_BITS = 16


def default_tasks(engines: dict[str, Casts], names: list[str] | None = None) -> list[Task]:
    """Return the checks of all listed formats, or of the named ones, that together take less than a minute."""
    tasks = []
    for fmt in (get_format(name) for name in names or list_formats()):
        scaled = isinstance(fmt, BlockFormat | LogTileFormat)
        chosen: list[tuple[str, Callable[..., Outcome]]] = []
        if scaled:
            chosen.append(("block oracle", checks.blocks_against_oracle))
        if not scaled and fmt.bits <= ORACLE_BITS:
            chosen.append(("oracle", checks.against_oracle))
        if not scaled and fmt.bits <= CODE_BITS:
            chosen.append(("codes", checks.all_codes))
        if len(engines) > 1:
            chosen.append(("engines", checks.between_engines))
        tasks += [_task(name, fmt, lambda _, fmt=fmt, check=check: check(fmt, engines)) for name, check in chosen]  # type: ignore[misc]
    return tasks


def exhaustive_tasks(engines: dict[str, Casts], names: list[str] | None = None) -> list[Task]:
    """Return the checks over all 2**32 float32 inputs.

    Raises:
        FormatError: A name has no independent implementation to compare with.
    """
    known = {name: get_format(name) for name in FORMATS}
    chosen = [get_format(name) for name in names] if names else list(known.values())
    for fmt in chosen:
        if fmt not in known.values():
            raise FormatError(
                f"{fmt.name} has no exhaustive check; choose {', '.join(known)}, or leave --exhaustive out"
            )
    return [_task("exhaustive", fmt, partial(all_inputs, fmt, engines)) for fmt in chosen]  # type: ignore[arg-type]


def _task(check: str, fmt: Format, function: Callable[[Advance], Outcome]) -> Task:
    failed = partial(Outcome, check=check, format=fmt.name, cases=1, mismatches=1)
    return task_of(f"{check} {fmt.name}", function, lambda error: failed(first=f"the check {error}"))
