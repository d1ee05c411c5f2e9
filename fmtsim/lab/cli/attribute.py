# SPDX-License-Identifier: Apache-2.0
"""``fmtsim attribute``: what each operand of each layer of a model costs in loss."""

import argparse
from functools import partial

from fmtsim.lab.analysis.attribute import attribute
from fmtsim.lab.analysis.page import write_page
from fmtsim.lab.cli.model_options import configuration, file_given, formats_given, load_plain
from fmtsim.lab.cli.output import answer
from fmtsim.recipes.serialization import recipe_to_dict, save_rules


def run(arguments: argparse.Namespace) -> int:
    """Print the costs, the dearest first, and the layers to leave in high precision."""
    formats = formats_given(arguments)
    out, page = file_given(arguments, "out", ".json"), file_given(arguments, "report", ".html")
    loaded = load_plain(arguments, formats, count=1)
    sample = loaded.samples[0]
    found = attribute(
        loaded.model, sample.batch, partial(loaded.loss, sample), exact=arguments.exact, logits=loaded.logits,
        generator=arguments.seed, progress=not arguments.quiet, **formats,
    )  # fmt: skip
    how = {"share": arguments.share, "by": arguments.by}
    rules, advice = found.rules(**how), found.advice(**how)
    if out is not None:
        save_rules(rules, out)
    if page is not None:
        title = f"What {arguments.recipe or arguments.format or 'its formats'} costs {loaded.name}"
        write_page(page, title=title, attribution=found, notes=[loaded.data, *advice.splitlines()],
                   configuration=configuration(arguments))  # fmt: skip
    written = [str(path) for path in (out, page) if path is not None]
    record = {
        "model": loaded.name, "data": loaded.data, **found.to_dict(), "rules": [recipe_to_dict(rule) for rule in rules],
        "files": written,
    }  # fmt: skip
    parts = [str(found), loaded.data, "", advice, *([f"wrote {' and '.join(written)}"] if written else [])]
    answer(arguments, record, lambda: "\n".join(parts))
    return 0
