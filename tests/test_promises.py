# SPDX-License-Identifier: Apache-2.0
"""Every sentence of the definitions and the README has its row on the page of promises, and its tests exist."""

from tests.support.promises import OTHERWISE, PAGE, promises, rows, sentences, written
from tools.mutants.seen import collected

DOCTESTS = ("README.md::README.md",)


def wrong(page, lines):
    """Return what is wrong with a page: sentences that it lacks or words otherwise, and tests that do not run."""
    named = rows(page)
    found = [f"{n} {line}: renew the page" for n, line in lines.items() if named.get(n, ("",))[0] != line]
    found += [f"{n} stands in no document: renew the page" for n in named if n not in lines]
    tests = {*collected(), *DOCTESTS, *OTHERWISE}
    for number, (_, names) in named.items():
        found += [f"{number}: {name} does not run by default" for name in names if name not in tests]
        found += [f"{number} names no test"] * (not names)
    return found


def test_every_sentence_names_tests_that_run():
    page = PAGE.read_text(encoding="utf-8")
    assert wrong(page, promises()) == []
    assert page == written(promises(), dict(rows(page).values()))
    without = [names for _, names in rows(page).values() if set(names) <= set(OTHERWISE)]
    assert len(without) < 50  # of about 190: most sentences promise something


def test_sentences_that_change_and_tests_that_go_are_noticed():
    page, lines = PAGE.read_text(encoding="utf-8"), promises()
    number = next(n for n, line in lines.items() if line.startswith("Overflow always saturates, Inf included"))
    edited = lines | {number: "Overflow always saturates.", "99.1": "A new promise."}
    assert [line.split()[0] for line in wrong(page, edited)] == [number, "99.1"]
    fewer = {n: line for n, line in lines.items() if n != number}
    assert wrong(page, fewer) == [f"{number} stands in no document: renew the page"]
    renamed = page.replace("::test_codebook_rules", "::test_codebook")
    assert wrong(renamed, lines) and all(
        "test_codebook does not run by default" in line for line in wrong(renamed, lines)
    )
    assert f"{number} names no test" in wrong(written(lines, {}), lines)


def test_sentences_of_a_document():
    text = """# Title
First. Second, e.g. [a link](b.md)
goes on.
## One
- Item: `x`.
| a | b |
|---|---|
| 1 | K = 1 ... n |
```python
no = 1
```
1. Last!
"""
    lines = {"R0.1": "First.", "R0.2": "Second, e.g. a link goes on.", "R1.1": "Item: `x`.", "R1.2": "| a | b |"}
    assert sentences(text, "R") == lines | {"R1.3": "| 1 | K = 1 ... n |", "R1.4": "Last!"}
