# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/gallery.md again: ``python docs/site/gallery.py`` (needs matplotlib and Chromium).

Runs the page's Python and shell lines one after the other in an empty folder, and copies the pictures that the page
shows from there to docs/assets/gallery.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parents[1]


def main() -> None:
    """Run every block, then collect the pictures by name."""
    page = (DOCS / "gallery.md").read_text("utf-8")
    pictures = re.findall(r"\(assets/gallery/(\S+\.png)\)", page)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        names: dict[str, object] = {}
        for language, block in re.findall(r"```(python|bash)\n(.*?)```", page, re.DOTALL):
            if language == "python":
                exec(compile(block, "gallery.md", "exec"), names)
            else:
                line = re.sub("^fmtsim ", f"{sys.executable} -m fmtsim ", block)
                subprocess.run(line, shell=True, check=True)
        found = {path.name: path for path in Path(folder).rglob("*.png")}
        (DOCS / "assets" / "gallery").mkdir(exist_ok=True)
        for picture in pictures:
            shutil.copy(found[picture], DOCS / "assets" / "gallery" / picture)
        os.chdir(DOCS)


if __name__ == "__main__":
    main()
