# SPDX-License-Identifier: Apache-2.0
"""Write the generated tables of the pages: ``python docs/site/tables.py``; with ``--check``, exit 1 if one is stale.

A page has a table between ``<!-- table: NAME -->`` and ``<!-- end -->``, NAME being a key of ``TABLES``. Rows are made
from the records of the catalogues, from the parsers of the command line, and from the measurements in
``benchmarks/results``: of those ``measured.toml`` says what a table shows.
"""

import fnmatch
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from fmtsim.casts.profile import library_profiles, list_profiles
from fmtsim.distributed import REDUCTIONS, Reduction
from fmtsim.gemm.layers.config import LinearConfig
from fmtsim.lab.cli.main import GROUPS, build_parser
from fmtsim.optim.catalogue import scheme_table
from fmtsim.ptq.export.catalogue import table as layout_table
from fmtsim.recipes import catalogue, ptq_catalogue
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import Recipe
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.table import Row, markdown

DOCS = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SAME: Final = '"'  # a source that is that of the row above

# The words of records, and how tables abbreviate them; docs/recipes.md has the legend.
ABBREVIATIONS: Final = (
    (r"the forward codes", "codes"),
    (r"high precision", "hp"),
    (r"amax of ", ""),
    (r"the tensor's dtype", "own dtype"),
    (r"the tensor\b", "tensor"),
    (r"each row(?=[,\]])", "row"),
    (r"(exponent|power of two) by (\w+)", r"2^\2"),
    (r"tensor scale \((\w+)\)", r"+\1"),
    (r"best of 1, 1.5 by (\w+)", r"4/6 \1"),
    (r"best of ([\d.]+), .*, ([\d.]+) by (\w+)", r"best of \1...\2 by \3"),
    (r"one of tensor, x (\d+)", r"fixed \1"),
    (r"^times", "loss times"),
    (r"^the rest in", "rest in"),
    (r"(\w+) of (\d+) calls", r"\1 \2"),
    (r"nearest_away", "RA"),
    (r"nearest_toward_zero", "RNZ"),
    (r"toward_zero", "RZ"),
    (r"stochastic", "SR"),
    (r"Hadamard (\w+), random signs,?", r"H\1±"),
    (r"Hadamard (\w+), signs 0xd7e8, in bf16,?", r"H\1-te"),
    (r"Hadamard (\w+), of the outer axis, undone,?", r"H\1-outer"),
    (r"Hadamard (\w+),?", r"H\1"),
    (r"requantised,?", "again"),
    (r"blocks of 1, exact, nearest_even to fp32", "chain"),
    (r"gradients in hp", "backward hp"),
    (r"name ~ (\S+):", r"`\1`:"),
)


def short(text: object) -> str:
    """Return the text of a record in the abbreviations of the tables, without spaces inside the brackets of scales."""
    text = str(text)
    for pattern, replacement in ABBREVIATIONS:
        text = re.sub(pattern, replacement, text)
    return re.sub(r"(?:, )?\[.*?\]", lambda found: re.sub(r"^, |(?<=,) ", "", found[0]), text)


def recipe_table() -> str:
    """Return the recipes for training: three operands, what else runs differently, source."""
    rows = [
        (recipe, (*operands(recipe.linear or LinearConfig()), besides(recipe), origin(recipe)))
        for recipe in catalogue.RECIPES
    ]
    return grouped(("name", "x", "w", "g", "besides", "source"), rows)


def operands(config: LinearConfig) -> tuple[str, str, str]:
    """Return x, w and g of a layer: the quantiser of the first product, and that of the second where it differs."""
    q = config.operands
    return uses(q["x_f"], q["x_w"]), uses(q["w_f"], q["w_d"]), uses(q["g_d"], q["g_w"])


def uses(first: Quantizer, second: Quantizer) -> str:
    """Return the quantisers of both uses of a tensor, one where they are alike."""
    return short(first) if first == second else f"{short(first)}; {short(second)}"


def besides(recipe: Recipe) -> str:
    """Return what a recipe says beside the operands of its layers."""
    exceptions = [
        (rule.where, "hp" if rule.use is None else " and ".join(operands(rule.use)[:2])) for rule in recipe.rules
    ]
    parts = [f"{where}: {how}" for where, how in exceptions]
    parts += [text for name, text in recipe.facts() if name not in ("rule", "level", "variant", "source", "notes")]
    parts += [f"levels {', '.join(level.name for level in recipe.levels)}"] if recipe.levels else []
    out = recipe.linear.wgrad.out if recipe.linear else Quantizer()
    return "; ".join(map(short, [*([f"dw to {out}"] if out.format else []), *parts]))


def ptq_table() -> str:
    """Return the recipes for quantisation after training: two operands, methods, source."""
    rows = [(r, (short(r.x), short(r.w), short(methods(r)), origin(r))) for r in ptq_catalogue.RECIPES]
    return grouped(("name", "x", "w", "method", "source"), rows)


def grouped(header: Row, rows: Sequence[tuple[Recipe | PtqRecipe, Row]]) -> str:
    """Return a table in which recipes share a row that differ in the format alone, which is F there."""
    groups: dict[Row, list[tuple[Recipe | PtqRecipe, Row]]] = {}
    for recipe, cells in rows:
        key = *(without_format(cell, recipe.name) for cell in cells[:-1]), cells[-1]
        groups.setdefault(key, []).append((recipe, cells))
    table = [header]
    for key, members in groups.items():
        cells = key if len(members) > 1 else members[0][1]
        table.append((listed([named(recipe) for recipe, _ in members]), *cells))
    return tight(without_repeats(table))


def tight(rows: Iterable[Row]) -> str:
    """Return a table in Markdown without spaces at the bars: long rows are read on the site, not in the file."""
    return re.sub(r" ?(?<!\\)\| ?", "|", markdown(list(rows)))


def without_format(cell: str, name: str) -> str:
    """Return a cell with F for its first format, if the name of the recipe begins with it, or has its ``eXmY``."""

    def letter(found: re.Match[str]) -> str:
        fields = re.match(r"e\dm\d", found[0])
        in_name = fields is not None and fields[0] in name
        return "F" if in_name or re.match(rf"{found[0]}(_|$)", name) else found[0]

    return re.sub(r"^\w+|(?<=sparse, )\w+", letter, cell)


def listed(names: list[str]) -> str:
    """Return names, of a long series the first and the last."""
    return ", ".join(names) if len(names) < 20 else f"{names[0]} to {names[-1]} ({len(names)})"


def methods(recipe: PtqRecipe) -> str:
    """Return how scales and weights of a recipe are found."""
    lines = str(recipe).splitlines()[3:]
    parts = [line.removeprefix("with: ") for line in lines if not line.startswith(("source:", "notes:"))]
    calibration = [f"static {recipe.calibration}".removesuffix(" absmax")] if recipe.calibration else []
    sets = {len(q.scaling.allowed) for q in (recipe.x, recipe.w) if q.scaling and q.scaling.allowed}
    return "; ".join(calibration + [f"{number} scales" for number in sets] + parts)


def reduction_table() -> str:
    """Return the reductions of gradients."""
    factors = {"auto": "mu", "pre": "1/N", "post": "1", "sqrt": "1/sqrt(N)"}
    rows: list[Row] = [("name", "format", "factor", "scale", "NaN and Inf", "source")]
    for name, r in REDUCTIONS.items():
        scale = short(f"[{r.scaling}]") if r.scaling else "none"
        rows.append((f"`{name}`", r.format.name, factors[r.factor], scale, r.nonfinite, origin(r)))
    return markdown(list(without_repeats(rows)))


def command_table() -> str:
    """Return the commands by task: positional arguments, and what a command does."""
    rows: list[Row] = [("command", "")]
    for title, commands in GROUPS.items():
        rows.append((f"**{title}**", ""))
        for name, summary in commands.items():
            actions = build_parser(name).actions
            words = [str(action.metavar or action.dest).upper() for action in actions if not action.option_strings]
            rows.append((f"`{' '.join([name, *words])}`", summary))
    return tight(rows)


def named(recipe: Recipe | PtqRecipe) -> str:
    """Return the name and the aliases of a recipe."""
    return ", ".join(f"`{name}`" for name in (recipe.name, *recipe.aliases))


def origin(record: Recipe | PtqRecipe | Reduction) -> str:
    """Return the source of a record: paper or library and version, without the remark behind them."""
    return re.split(": |, its ", record.source)[0]


def without_repeats(rows: list[Row]) -> Iterator[Row]:
    """Yield rows whose last cell is a ditto mark where it is that of the row above."""
    above = ""
    for row in rows:
        yield (*row[:-1], SAME if row[-1] == above else row[-1])
        above = row[-1]


def profile_table() -> str:
    """Return the libraries whose casts are reproduced: what like= takes, formats, what was compared."""
    rows = []
    for library in dict.fromkeys(name.partition("/")[0] for name in list_profiles()):
        profiles = library_profiles(library)
        names = ", ".join(f"`{name}`" for name in dict.fromkeys(profile.like for profile in profiles))
        formats = " ".join(dict.fromkeys(fmt for profile in profiles for fmt in profile.formats))
        versions = ", ".join(dict.fromkeys(f"{profile.versions} ({profile.device})" for profile in profiles))
        rows.append((names, formats, versions))
    return markdown([("like=", "formats", "compared with"), *rows])


def profile_details() -> str:
    """Return every cast of another library: formats, function, what to know, source, what was compared."""
    rows = [
        (f"`{profile.like}`", " ".join(profile.formats),
         *(getattr(profile, name) for name in ("function", "notes", "source", "verified")))
        for library in dict.fromkeys(name.partition("/")[0] for name in list_profiles())
        for profile in library_profiles(library)
    ]  # fmt: skip
    return markdown([("like=", "formats", "function", "what to know", "source", "compared"), *rows])


def not_reproduced_table() -> str:
    """Return casts that no profile reproduces, and why."""
    record = tomllib.loads((DOCS.parent / "tools/peers/not_reproduced.toml").read_text("utf-8"))
    rows = [(entry["library"], entry["what"], entry["why"]) for entry in record.get("cast", [])]
    return markdown([("library", "cast", "why not"), *rows])


ON_SITE: Final = {"profile_details": profile_details}
"""Tables that the site alone has, in place of ``<!-- site table: NAME -->``: nobody reads so long ones in a file."""


MEASURED: Final = tomllib.loads(Path(__file__).with_name("measured.toml").read_text("utf-8"))
KINDS: Final = ("kernels", "products", "overheads", "results")
RECORDS: Final = Path(__file__).parents[2] / "benchmarks/results"


def measured_table(first: str, columns: list[list[str]], rows: list[list[str]]) -> str:
    """Return a table of measurements, and below it each record's machine, date, commit and command.

    Raises:
        KeyError, ValueError: A record does not say when and at what commit it was made, or none has a row's cases.
    """
    names = dict.fromkeys(name for _, names, *_ in columns for name in names.split())
    records = {name: json.loads((RECORDS / f"{name}.json").read_text("utf-8")) for name in names}
    table: list[Row] = [(first, *(column[0] for column in columns))]
    for label, *patterns in rows:
        cells = ([records[name] for name in names.split()] for _, names, *_ in columns)
        table.append(
            (label, *(measured_cell(of, patterns, *column[2:]) for of, column in zip(cells, columns, strict=True)))
        )
        if not any(table[-1][1:]):
            raise ValueError(f"no record of the table has {patterns}, which {label!r} asks for")
    return "\n".join([tight(table), "", *(provenance(name, records, columns) for name in records)])


def measured_cell(records: list[dict[str, Any]], patterns: list[str], case: str, shown: str) -> str:
    """Return what records show of the cases of some patterns: one, or the least and the largest."""
    results = itertools.chain(*(record.get(kind, ()) for record in records for kind in KINDS))
    cells = [
        shown.format_map(result | result.get("threads", {}).get("1", {}))
        for result in results
        if any(fnmatch.fnmatchcase(result.get("case", result.get("name")), case.format(name)) for name in patterns)
    ]
    ends = sorted(set(cells), key=lambda cell: float(cell.split()[0]))
    return " to ".join(dict.fromkeys((ends[0], ends[-1]))) if ends else ""


def provenance(name: str, records: dict[str, Any], columns: list[list[str]]) -> str:
    """Return a line about a record: its columns, where there are several records, machine, date, commit and command."""
    about = records[name]["machine"]
    heads = [head for head, names, *_ in columns if name in names.split()] if len(records) > 1 else []
    if about["commit"] == "unknown" or about["commit"].endswith("dirty"):
        raise ValueError(f"{name}: a record of commit {about['commit']!r} cannot be made again; set FMTSIM_COMMIT")
    facts = (about.get("device") or about["processor"], f"torch {about['torch']}", about["date"][:10], about["commit"])
    command = re.sub(r" --record \S+", "", about["command"])
    return f"- {'; '.join(heads)}{': ' * bool(heads)}{', '.join(facts)}, `{command}`{about.get('note', '')}"


def missed_targets() -> str:
    """Return, for each record of the tables, which cases miss their targets: what they reach, of what is asked."""
    goals = (("extra_cost", "extra_limit"), ("ratio_to_copy", "target"), ("ratio_to_sgemm", "target"),
             ("value", "target"), ("value", "limit"))  # fmt: skip
    names = dict.fromkeys(column[1] for table in MEASURED.values() for column in table["columns"])
    lines = []
    for name in (name for words in names for name in words.split()):
        record, parts = json.loads((RECORDS / f"{name}.json").read_text("utf-8")), []
        for result in (result for kind in KINDS for result in record.get(kind, ())):
            fields = result | result.get("threads", {}).get("1", {})
            if result.get("met") is False:
                pair = next(pair for pair in goals if None not in (fields.get(pair[0]), fields.get(pair[1])))
                parts.append(f"{fields.get('case', fields.get('name'))} {fields[pair[0]]:.2f} of {fields[pair[1]]:g}")
        lines += [f"- `{name}`: {'; '.join(parts)}."] if parts else []
    return "\n".join(lines)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "recipes": recipe_table, "ptq": ptq_table, "schemes": scheme_table, "reductions": reduction_table,
    "cli": command_table, "layouts": layout_table, "profiles": profile_table, "not_reproduced": not_reproduced_table,
    "missed": missed_targets, **{name: partial(measured_table, **table) for name, table in MEASURED.items()},
}  # fmt: skip


def written(page: str) -> str:
    """Return the text of a page with its tables made anew; KeyError for a table that does not exist."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", page)


def main(arguments: list[str]) -> int:
    """Write the tables of all pages, or name the pages whose tables are stale."""
    stale = [path for path in sorted(DOCS.rglob("*.md")) if (text := path.read_text("utf-8")) != written(text)]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.relative_to(DOCS.parent)} is stale; run python docs/site/tables.py", file=sys.stderr)
        else:
            path.write_text(written(path.read_text("utf-8")), "utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
