"""Show the examples of docstrings as code: a griffe extension that mkdocs.yml names."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)(>>> .*(?:\n\1(?!\s*$).*)*)", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put each run of lines that begins with ``>>>`` between the fences of a Markdown code block."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Rewrite the docstring of what was read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    return f"{found[1]}```pycon\n{found[0]}\n{found[1]}```"
