# SPDX-License-Identifier: Apache-2.0
"""The sentences of the documents that promise something, numbered, and the tests that ``docs/promises.md`` names.

A sentence's number is its section and its place there; ``R`` stands before those of the README. Who changes a sentence
writes the page anew, and names the tests of what is new::

    python -m tests.support.promises
"""

import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/promises.md"
DOCUMENTS = {"docs/semantics.md": "", "README.md": "R"}
OTHERWISE = ("definition", "no promise", "measured")
"""What stands in the place of tests: words that others use, what promises nothing, and times, which evidence shows."""

_HEAD = """# Promises and their tests

Every sentence of the [definitions](semantics.md) and of the README, by its section and its place there, with the tests
that fail where it does not hold. Tests of the oracle hold it to its sentence; those of `tests/engines/equality` hold
every engine to the oracle. A *definition* names what other sentences use; *measured* is a time or a comparison that no
test repeats, with its evidence in [performance](performance.md). The tests read this page: a sentence that is new or
changed, or a test that no longer runs, fails them.
"""
_BLOCKS = re.compile(r"\n\s*\n|\n(?= *(?:[-|#]|\d+\. ))|(?<=\|)\n")
_ENDS = re.compile(r"(?<=[^.]\.|.[!?])(?<!e\.g\.)\s+(?=\S)")
_ROW = re.compile(r"^- \*\*(\S+)\*\* (.*)\n  (.*)$", re.M)


def sentences(text: str, letter: str = "") -> dict[str, str]:
    """Return a document's sentences by number: a row of a table is one; code, HTML, pictures and links' targets go."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->|<picture>.*?</picture>|^!\[.*?\)$", "", text, flags=re.M | re.S)
    text = re.sub(r"\[([^\]]*)\]\([^)\s]+\)", r"\1", re.sub(r"^(#.*)$", r"\n\1\n", text, flags=re.M))
    numbered: dict[str, str] = {}
    section = place = 0
    for block in _BLOCKS.split(text):
        block = " ".join(block.split())
        if block.startswith("#"):
            section, place = section + block.startswith("## "), 0
        elif re.search(r"[a-z]", block):
            block = re.sub(r"^(?:[-*]|\d+\.) ", "", block)
            lines = [block] if block.startswith("|") else _ENDS.split(block)
            numbered |= {f"{letter}{section}.{place + i}": sentence for i, sentence in enumerate(lines, 1)}
            place += len(lines)
    return numbered


def promises() -> dict[str, str]:
    """Return the sentences of all documents by number."""
    texts = {letter: (ROOT / name).read_text(encoding="utf-8") for name, letter in DOCUMENTS.items()}
    return {number: line for letter, text in texts.items() for number, line in sentences(text, letter).items()}


def rows(page: str) -> dict[str, tuple[str, list[str]]]:
    """Return a page's sentences by number, each with its tests or with one of ``OTHERWISE``."""
    return {number: (line, re.findall(r"[^`, ]*::[^`, ]*|definition|no promise|measured", tests))
            for number, line, tests in _ROW.findall(page)}  # fmt: skip


def written(lines: Mapping[str, str], tests_of: Mapping[str, list[str]]) -> str:
    """Return the page: sentences by number, and the tests of each sentence."""
    text, section = _HEAD, ""
    for number, line in lines.items():
        if number.rpartition(".")[0] != section:
            section = number.rpartition(".")[0]
            text += f"\n## {'README, section ' if section[0] == 'R' else 'Section '}{section.lstrip('R')}\n"
        named = [name if name in OTHERWISE else f"`{name}`" for name in tests_of.get(line, [])]
        text += f"- **{number}** {line}\n  {', '.join(named) or 'TESTS ARE MISSING'}\n"
    return text


if __name__ == "__main__":
    tests_of_lines = dict(rows(PAGE.read_text(encoding="utf-8")).values()) if PAGE.exists() else {}
    PAGE.write_text(written(promises(), tests_of_lines), encoding="utf-8")
