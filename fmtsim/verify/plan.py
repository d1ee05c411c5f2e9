"""Which checks run on which formats."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fmtsim.errors import FormatError
from fmtsim.formats.block import BlockFormat, Format, LogTileFormat
from fmtsim.formats.registry import get_format, list_formats
from fmtsim.verify import checks
from fmtsim.verify.exhaustive import FORMATS, all_inputs
from fmtsim.verify.outcome import Engine, Outcome

ORACLE_BITS = 8
CODE_BITS = 16

Advance = Callable[[float], None]
"""Called by long checks with the share of the work that is done, 0 to 1."""


class Task(NamedTuple):
    """One check of one format, ready to run."""

    check: str
    format: str
    run: Callable[[Advance], Outcome]

    @property
    def name(self) -> str:
        """What a progress bar shows."""
        return f"{self.check} {self.format}"


def default_tasks(engines: dict[str, Engine], names: list[str] | None = None) -> list[Task]:
    """Return the checks of all listed formats, or of the named ones, that together take less than a minute."""
    tasks = []
    for fmt in (get_format(name) for name in names or list_formats()):
        scaled = isinstance(fmt, BlockFormat | LogTileFormat)
        if scaled:
            tasks.append(_task("block oracle", fmt, checks.blocks_against_oracle, engines))
        if not scaled and fmt.bits <= ORACLE_BITS:
            tasks.append(_task("oracle", fmt, checks.against_oracle, engines))
        if not scaled and fmt.bits <= CODE_BITS:
            tasks.append(_task("codes", fmt, checks.all_codes, engines))
        if len(engines) > 1:
            tasks.append(_task("engines", fmt, checks.between_engines, engines))
    return tasks


def exhaustive_tasks(engines: dict[str, Engine], names: list[str] | None = None) -> list[Task]:
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
    return [Task("exhaustive", fmt.name, partial(all_inputs, fmt, engines)) for fmt in chosen]  # type: ignore[arg-type]


def _task(check: str, fmt: Format, function: Callable[..., Outcome], engines: dict[str, Engine]) -> Task:
    def run(advance: Advance) -> Outcome:
        try:
            return function(fmt, engines)
        except Exception as error:  # a check that cannot finish has failed, and the others are still worth running
            first = f"the check raised {type(error).__name__}: {error}"
            return Outcome(check=check, format=fmt.name, cases=1, mismatches=1, first=first)
        finally:
            advance(1.0)

    return Task(check, fmt.name, run)
