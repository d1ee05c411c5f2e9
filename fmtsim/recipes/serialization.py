# SPDX-License-Identifier: Apache-2.0
"""Recipes as JSON: records as objects without their defaults, formats by name where they are catalogued."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fmtsim.formats.block import Format
from fmtsim.formats.registry import format_to_dict, get_format
from fmtsim.gemm.layers.config import linear_config
from fmtsim.recipes.ptq import PtqRecipe
from fmtsim.recipes.recipe import Recipe, Rule
from fmtsim.spec.datapath import Arithmetic
from fmtsim.spec.gemm_spec import record_to_dict
from fmtsim.spec.plan import GemmPlan
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, FormatError, shown
from fmtsim.support.files import write_file
from fmtsim.support.records import kinds_of, load_record, record_of, type_hints

_PTQ: Final = "PtqRecipe"


def recipe_to_dict(record: Any) -> dict[str, Any]:
    """Return a recipe, or a part of one, as plain JSON types, defaults left out; a PtqRecipe says its kind."""
    hints = type_hints(record.__class__)
    items = ((field, getattr(record, field.name)) for field in dataclasses.fields(record) if field.init)
    kind = {"kind": _PTQ} if isinstance(record, PtqRecipe) else {}
    return kind | {field.name: _plain(hints[field.name], value) for field, value in items if value != field.default}


def _plain(hint: Any, value: Any) -> Any:
    if isinstance(value, Format):
        try:
            catalogued = get_format(value.name)
        except FormatError:
            catalogued = None
        return value.name if catalogued == value else format_to_dict(value)
    if isinstance(value, Arithmetic | GemmPlan):
        return record_to_dict(value)
    if isinstance(value, tuple):
        return [_plain(hint, item) for item in value]
    if dataclasses.is_dataclass(value):
        kind = {"kind": type(value).__name__} if len(kinds_of(hint)) > 1 else {}
        return kind | recipe_to_dict(value)
    return value


def recipe_from_dict(record: dict[str, Any]) -> Recipe | Any:
    """Build a Recipe, or a PtqRecipe where the record is of one, from ``recipe_to_dict``'s record.

    Raises:
        ArgumentError: A field that no record has, or one of another type; it names the way to the field.
        FormatError: A format, rounding or scale rule that does not exist; likewise.
    """
    return _recipe_of(record, "recipe")


def _recipe_of(record: Any, path: str) -> Any:
    """Return a PtqRecipe where the record says so or has its operands x or w, a Recipe of a Quantizer, or a Recipe."""
    if isinstance(record, dict) and "format" in record:  # a Quantizer alone, of all operands
        quantizer = record_of(Quantizer, record, path)
        return Recipe(name=str(quantizer), linear=linear_config(quantizer))
    kind = record.get("kind") if isinstance(record, dict) else None
    if isinstance(record, dict) and ((isinstance(kind, str) and kind == _PTQ) or "x" in record or "w" in record):
        return record_of(PtqRecipe, {name: value for name, value in record.items() if name != "kind"}, path)
    return record_of(Recipe, record, path)


def save_recipe(recipe: Recipe | PtqRecipe | Quantizer, path: str | Path) -> None:
    """Write a recipe to a JSON file, which is accepted wherever a recipe's name is; a Quantizer is of all operands.

    Raises:
        ArgumentError: It is none of these.
    """
    if not isinstance(recipe, Recipe | PtqRecipe | Quantizer):
        raise ArgumentError(f"recipe is {shown(recipe)}; pass a Recipe, a PtqRecipe, or fmtsim.Quantizer(format=...)")
    write_file(path, json.dumps(recipe_to_dict(recipe), indent=2) + "\n")


def load_recipe(path: str | Path) -> Recipe | Any:
    """Read a Recipe or a PtqRecipe from a JSON file.

    Raises:
        ArgumentError: It cannot be read, or is not a recipe; the message has the file and the field.
    """
    return load_record(path, "recipe file", lambda value, name: _recipe_of(value, f"{name}: recipe"))


def save_rules(rules: Sequence[Rule], path: str | Path) -> None:
    """Write rules to a JSON file, which ``convert(rules=)`` takes."""
    write_file(path, json.dumps({"rules": list(map(recipe_to_dict, rules))}, indent=2) + "\n")


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """Read the rules of a JSON file: what ``save_rules`` wrote, or a recipe's file, of which nothing else is taken.

    Raises:
        ArgumentError: It cannot be read, or has no rules; the message has the file and the field.
    """

    def read(value: Any, name: str) -> tuple[Rule, ...]:
        rules = value.get("rules") if isinstance(value, dict) else None
        if not isinstance(rules, list) or not rules:
            raise ArgumentError(f'{name} has no rules; write {{"rules": [{{"name": "lm_head"}}]}}')
        return record_of(Recipe, {"name": "rules", "rules": rules}, name).rules  # type: ignore[no-any-return]

    return load_record(path, "file of rules", read)


def rules_of(rules: Sequence[Rule] | str | Path) -> tuple[Rule, ...]:
    """Return rules that are given as such, or as a file of them.

    Raises:
        ArgumentError: They are neither, or ``load_rules`` raises it.
    """
    loaded = load_rules(rules) if isinstance(rules, str | Path) else rules
    if not isinstance(loaded, Sequence) or not all(isinstance(rule, Rule) for rule in loaded):
        raise ArgumentError(f"rules={shown(rules)} is not a list of Rules; write rules=[Rule(name='lm_head')]")
    return tuple(loaded)
