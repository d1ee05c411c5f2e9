# SPDX-License-Identifier: Apache-2.0
"""Time a traced step against the same step: ``python benchmarks/trace.py --device cuda``.

The model is the GPT of ``benchmarks.suite layers`` (124 million parameters, bfloat16 autocast on a GPU), in eager mode,
plain and under recipes; steps are forward, backward and AdamW. Traced and plain steps alternate, and the ratio is that
of the medians. What asking for the record of a traced step takes then is printed apart.
"""

import argparse
import statistics
import time

import fmtsim
from benchmarks.suite.layers import Case, Step, wait
from benchmarks.suite.models import GPU_SIZES


def seconds(step: Step, traced: bool, level: str) -> tuple[float, float]:
    """Return what a step takes, and the record of its operations."""
    began, record = time.perf_counter(), 0.0
    if traced:
        with fmtsim.trace(step.model, level=level) as run:
            step()
    else:
        step()
    wait(step.device)
    ended = time.perf_counter()
    if traced:
        assert run.trace.operations
        record = time.perf_counter() - ended
    return ended - began, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--recipes", default="none,te_current", help="'none' is the plain model")
    parser.add_argument("--target", help="a GPU whose products are emulated or run, such as h200")
    parser.add_argument("--emulate", action="store_true", help="emulate the target's products")
    parser.add_argument("--layers", type=int, help="instead of 12")
    parser.add_argument("--width", type=int, help="instead of 768")
    parser.add_argument("--vocabulary", type=int, help="instead of 50304")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--level", default="modules", choices=("modules", "aten"))
    arguments = parser.parse_args()
    names = ("width", "layers", "vocabulary")
    given = {name: getattr(arguments, name) for name in names}
    sizes = GPU_SIZES["gpt"].resized(**given, batch_size=arguments.batch, context=arguments.tokens)
    machine = {"target": arguments.target, "native": False if arguments.emulate else None} if arguments.target else {}
    for recipe in arguments.recipes.split(","):
        case = Case(model="gpt", mode="eager", recipe=None if recipe == "none" else recipe)
        step = Step(case, sizes, arguments.device, **machine)
        for traced in (False, True, False, True):
            seconds(step, traced, arguments.level)
        turns = [[seconds(step, each, arguments.level) for each in (False, True)] for _ in range(arguments.steps)]
        plain = statistics.median(turn[0][0] for turn in turns)
        traced, record = (statistics.median(turn[1][i] for turn in turns) for i in (0, 1))
        print(
            f"{recipe}: plain {1e3 * plain:.1f} ms, traced {1e3 * traced:.1f} ms, {traced / plain:.2f}x; "
            f"the record then {1e3 * record:.1f} ms"
        )


if __name__ == "__main__":
    main()
