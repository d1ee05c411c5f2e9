# SPDX-License-Identifier: Apache-2.0
"""Plan files: what they hold of a GPU with its library, read from JSON, checked, and written as JSON."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from fmtsim.gemm.targets.book import Book, file_beside
from fmtsim.gemm.targets.kernel import Kernel, Rule, Splits
from fmtsim.gemm.targets.learned import Learned
from fmtsim.gemm.targets.order import Architecture
from fmtsim.gemm.targets.question import DEFAULT, Settings, settings_of
from fmtsim.gemm.units.unit import PLANS, get_unit
from fmtsim.support.errors import ArgumentError, shown
from fmtsim.support.records import READERS, at, check_types, fields_of, located, record_of

READERS[Kernel] = Kernel.from_dict
_CHANGES = ("library", "architecture", "source", "kernels", "rules")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFile:
    """Describe a GPU and its library: units by operand formats, kernels, and rules that say which one runs.

    Args:
        name: Name of the target.
        library: GPU, library and versions.
        source: Where the rules come from.
        units: ``(inputs, accumulate, unit)``: the first that fits is the unit of a call.
        kernels: By name, how each orders its sums.
        splits: By name, rules for the number of parts of K.
        rules: Which kernel runs for which calls; the first rule that fits counts.
        architecture: Of the GPU, which cuBLASLt's orders depend on; None where its algorithms are not named.
        book: The library's recorded choices: a file beside the plan file, or one that comes with fmtsim.
        trees: Decision trees for calls that the book lacks: files likewise, of which the first that has a kind of calls
            counts. A plan file names one, or lists them.
        settings: Settings of the process.
        overrides: How many rules, from the first, are about calls that another library than cuBLASLt computes: they
            come before the book.
    """

    name: str
    library: str
    source: str
    units: tuple[tuple[tuple[str, ...], str, str], ...]
    kernels: dict[str, Kernel]
    splits: dict[str, Splits]
    rules: tuple[Rule, ...]
    architecture: Architecture | None = None
    book: Book | None = None
    trees: tuple[Learned, ...] = ()
    settings: Settings = DEFAULT
    overrides: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.overrides <= len(self.rules):
            raise ArgumentError(f"overrides={self.overrides} is not possible; choose from 0 to {len(self.rules)} rules")
        if self.architecture is None and (self.book is not None or self.trees):
            raise ArgumentError(
                "a book and trees name algorithms, whose orders depend on the GPU; give the architecture, 'sm_90'"
            )
        for inputs, accumulate, unit in self.units:
            for name in inputs:
                get_unit(unit).find(name, name, accumulate)
        for number, rule in enumerate(self.rules):
            with located(f"rules[{number}]"):
                if rule.kernel not in self.kernels:
                    raise ArgumentError(f"kernel={rule.kernel!r} is not listed; kernels are {', '.join(self.kernels)}")
                if isinstance(rule.split, str) and rule.split not in self.splits:
                    raise ArgumentError(f"split={rule.split!r} is not listed; splits are {', '.join(self.splits)}")

    @classmethod
    def from_dict(cls, record: dict[str, Any], path: str = "", folder: Path = PLANS) -> Self:
        """Build a plan file from what ``to_dict`` returns; raise ArgumentError or FormatError where it is not one.

        Args:
            record: The record.
            path: What errors call it.
            folder: Where its book and trees lie, unless they come with fmtsim.
        """
        fields = fields_of(record, path, "a Target")

        def file(what: str, name: Any) -> Path:
            if not isinstance(name, str) or Path(name).name != name or len(name) > 200:  # of 255 that file systems take
                raise at(path, ArgumentError, f"{what}={shown(name)} is not the name of a file beside the plan file")
            return file_beside(folder, name)

        with located(path):
            if fields.get("book") is not None:
                fields["book"] = Book.open(file("book", fields["book"]))
            names = fields.pop("trees", None)
            names = names if isinstance(names, list) else [] if names is None else [names]
            fields["trees"] = tuple(Learned.open(file("trees", name)) for name in names)
            if "settings" in fields:
                fields["settings"] = settings_of(fields["settings"])
        return record_of(cls, fields, path)  # type: ignore[no-any-return]

    def changed(self, name: str, record: dict[str, Any]) -> Self:
        """Return the plan file whose base this one is: another GPU or source, and rules that come before this one's.

        Raises:
            ArgumentError: The record has other fields, or a kernel by the name of one of the base.
        """
        if (other := next((key for key in record if key not in _CHANGES), None)) is not None:
            raise ArgumentError(f"{other!r} does not go with 'base', which settings, {', '.join(_CHANGES)} change")
        if not record:
            return self
        same = {"library": self.library, "source": self.source, "architecture": self.architecture}
        own = PlanFile.from_dict(
            {"name": name, "units": [], "kernels": {}, "splits": {}, "rules": [], **same, **record}
        )
        if both := own.kernels.keys() & self.kernels.keys():
            raise ArgumentError(f"kernel {min(both)!r} is one of {self.name}'s, whose rules name it; rename it")
        return replace(
            self, name=name, library=own.library, architecture=own.architecture, source=own.source,
            kernels=self.kernels | own.kernels, rules=own.rules + self.rules,
            overrides=len(own.rules) + self.overrides,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the plan file as plain JSON types."""
        trees = [Path(file.name).name for file in self.trees]
        usual = DEFAULT._asdict()
        settings = {name: value for name, value in self.settings._asdict().items() if value != usual[name]}
        library = {
            "architecture": self.architecture,
            "book": self.book and Path(self.book.name).name,
            "trees": trees[0] if len(trees) == 1 else trees or None,
            "settings": settings or None,
            "overrides": self.overrides or None,
        }
        return {
            "name": self.name,
            "library": self.library,
            "source": self.source,
            **{name: value for name, value in library.items() if value is not None},
            "units": [[list(inputs), accumulate, unit] for inputs, accumulate, unit in self.units],
            "kernels": {name: kernel.to_dict() for name, kernel in self.kernels.items()},
            "splits": {name: split.to_dict() for name, split in self.splits.items()},
            "rules": [
                {name: getattr(rule, name) for name in Rule.__dataclass_fields__ if getattr(rule, name) is not None}
                for rule in self.rules
            ],
        }
