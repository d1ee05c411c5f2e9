# SPDX-License-Identifier: Apache-2.0
"""Build the documentation site: ``python docs/site/build.py``; every warning is an error, and no network is needed.

Pages are collected in ``build/pages`` first: those of ``docs/``, and as pages the README, the notebooks with their
recorded results, CONTRIBUTING and the changelog. ``mkdocs.yml`` says what becomes of them, in ``build/site``.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from tables import ON_SITE

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "build" / "pages"
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TUTORIALS = "tutorials"
# A picture of the README for dark and for light pages; the theme shows one of two images by their anchors.
PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="(.*?)">\s*<img src="(.*?)" alt="(.*?)">\s*</picture>')
SITE_TABLE = re.compile("<!-- site table: (.*?) -->")
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"] + "/blob/main"


def collect(into: Path) -> None:
    """Write every page of the site, and the files that pages show, into an empty folder."""
    shutil.rmtree(into, ignore_errors=True)
    shutil.copytree(ROOT / "docs", into, ignore=lambda folder, names: {"site"} if folder == str(ROOT / "docs") else {})
    (into / TUTORIALS).mkdir()
    for path in into.rglob("*.md"):
        page = path.relative_to(into).as_posix()
        later = "---\nsearch:\n  boost: 0.2\n---\n\n" * page.startswith(
            "api/"
        )  # a search finds prose before the reference
        text = SITE_TABLE.sub(lambda marked: ON_SITE[marked[1]](), path.read_text("utf-8"))
        path.write_text(later + linked(text, f"docs/{page}", page), "utf-8")
    for name, page in OUTSIDE.items():
        (into / page).write_text(linked((ROOT / name).read_text("utf-8"), name, page), "utf-8")
    index, page = "notebooks/README.md", f"{TUTORIALS}/index.md"
    (into / page).write_text(linked((ROOT / index).read_text("utf-8"), index, page), "utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        (into / TUTORIALS / f"{path.stem}.md").write_text(notebook(path, into / TUTORIALS), "utf-8")


def linked(text: str, path: str, page: str) -> str:
    """Return a text of the repository with links that fit its page: to other pages, else to the repository."""

    def turned(found: re.Match[str]) -> str:
        link, hash_, anchor = found[2].partition("#")
        if not link or "://" in link:
            return found[0]
        target = (ROOT / path).parent.joinpath(link).resolve().relative_to(ROOT).as_posix()
        place = page_of(target)
        if place is None:
            return f"{found[1]}({REPOSITORY}/{target})"
        return f"{found[1]}({os.path.relpath(place, Path(page).parent)}{hash_}{anchor})"

    text = PICTURE.sub(r"![\3](\2#only-light)\n![\3](\1#only-dark)", text)
    return re.sub(r"(\[[^\]]*\])\(([^)\s]+)\)", turned, text)


def page_of(target: str) -> str | None:
    """Return where a file of the repository is on the site; None where it is not."""
    if target in OUTSIDE:
        return OUTSIDE[target]
    if target.startswith("notebooks"):
        name = Path(target)
        return f"{TUTORIALS}/{name.stem if name.suffix == '.ipynb' else 'index'}.md"
    return target.removeprefix("docs/") if re.match("docs/(?!site/)", target) else None


def notebook(path: Path, pictures: Path) -> str:
    """Return a notebook with its recorded results as Markdown; its pictures go into a folder."""
    source = f"*The notebook [{path.name}]({REPOSITORY}/notebooks/{path.name}) with its recorded results.*"
    parts: list[str] = []
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        text = "".join(cell["source"]).strip()
        if cell["cell_type"] == "markdown":
            parts.append(formulas(linked(text, f"notebooks/{path.name}", f"{TUTORIALS}/{path.stem}.md")))
        elif text:
            parts.append(f"```python\n{text}\n```")
            results = enumerate(cell["outputs"])
            parts += [shown(result, pictures / f"{path.stem}_{number}_{i}.png") for i, result in results]
    head, _, rest = parts[0].partition("\n")
    return "\n\n".join(part for part in (head, source, rest, *parts[1:]) if part) + "\n"


def formulas(text: str) -> str:
    """Return Markdown whose formulas between dollar signs are MathML, which browsers draw by themselves."""

    def drawn(found: re.Match[str]) -> str:
        return f"<span>{convert(found[2], display='block' if found[1] == '$$' else 'inline')}</span>"

    return re.sub(r"(\$\$?)([^$`]+)\1", drawn, text)


def shown(result: dict[str, Any], picture: Path) -> str:
    """Return one result of a cell as Markdown: a picture, a table in HTML, or text."""
    data = result.get("data", {})
    if "image/png" in data:
        picture.write_bytes(base64.b64decode("".join(data["image/png"])))
        return f"[![Drawn by the code above]({picture.name})]({picture.name})"  # to see it in its own size
    if "text/html" in data:
        lines = "".join(data["text/html"]).splitlines()
        return "\n".join(['<div class="output">', *(line for line in lines if line.strip()), "</div>"])
    text = "".join(data.get("text/plain", result.get("text", ""))).rstrip()
    return f'<div class="output" markdown>\n\n```text\n{text}\n```\n\n</div>' if text else ""


def main() -> int:
    """Collect the pages and build the site; return the exit status."""
    collect(PAGES)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *sys.argv[1:]]
    status = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode
    index = ROOT / "build" / "site" / "search" / "search_index.json"
    if status == 0:  # from a disk the theme's search reads its index as a script
        index.with_suffix(".js").write_text(f"var __index = {index.read_text('utf-8')}", "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
