# SPDX-License-Identifier: Apache-2.0
"""Prepare docstrings for the site: a griffe extension that mkdocs.yml names."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)(>>> .*(?:\n\1(?!\s*$).*)*)", re.MULTILINE)
_TOGETHER = re.compile(r"^(    )(\w+(?:,\s+\w+)+): (.*(?:\n        .*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Show examples as code, and arguments that share a line (``a, b: Operands.``) one by one."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Rewrite the docstring of what was read."""
        if obj.docstring is not None:
            text = _TOGETHER.sub(_apart, obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub(_fenced, text)


def _apart(found: re.Match[str]) -> str:
    return "\n".join(f"{found[1]}{name}: {found[3]}" for name in re.split(r",\s+", found[2]))


def _fenced(found: re.Match[str]) -> str:
    return f"{found[1]}```pycon\n{found[0]}\n{found[1]}```"
