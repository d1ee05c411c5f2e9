# SPDX-License-Identifier: Apache-2.0
"""Call everything that takes strings, files or tensors with malformed inputs::

    python -m tools.fuzz --minutes 60             # all targets in turn, with fresh inputs until the time is over
    python -m tools.fuzz --target recipe --seed 7 # those whose name has this in it, again the same inputs
    python -m tools.fuzz --products h200 --calls 2000   # on an H200: its products against those that fmtsim says it has
    python -m tools.fuzz --against ml_dtypes,gfloat,torchao,compressed_tensors,gguf,mma_sim   # bits, against libraries

A call ends with a result, with one of fmtsim's own errors, or is a defect; the status is 1 where there was a defect.
"""

import argparse
import datetime
import faulthandler
import resource
import sys
import time

from tools.fuzz import calls, files, machines, models, peers, runs, saved, verbs
from tools.fuzz.target import SKIPPED, Report

TARGETS = [
    *files.TARGETS,
    *runs.TARGETS,
    *saved.TARGETS,
    *calls.TARGETS,
]  # machines, models and verbs fill those of calls
assert machines and models and verbs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__.split("::")[0])
    parser.add_argument("--minutes", type=float, default=60, help="how long (default 60)")
    parser.add_argument("--seed", type=int, help="of the inputs (default: the clock)")
    parser.add_argument("--target", default="", help="part of the names of targets")
    parser.add_argument("--round", type=int, default=500, help="inputs of a target before the next one (default 500)")
    parser.add_argument(
        "--products", metavar="TARGET", help="products of random sizes on the GPU that a target describes"
    )
    parser.add_argument("--calls", type=int, default=2000, help="of --products (default 2000)")
    parser.add_argument("--against", metavar="PEERS", help=f"libraries to compare with: {','.join(peers.PEERS)}")
    parser.add_argument("--memory", type=int, default=12, help="GiB that may be mapped (default 12)")
    parser.add_argument("--trace", action="store_true", help="show a traceback of each defect")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    if options.products is not None:
        from tools.fuzz import products  # which needs a GPU

        outcome = products.run(options.products, options.calls, options.minutes, seed)
        print(f"seed {seed}\n{outcome}")
        return 1 if outcome.different else 0
    if options.against is not None:
        names = options.against.split(",")
        if unknown := [name for name in names if name not in peers.PEERS]:
            parser.error(f"--against {unknown[0]}: choose from {', '.join(peers.PEERS)}")
        findings = peers.run(names, options.minutes, seed)
        print(findings)
        return 1 if findings.differing.total() else 0
    for name, module in SKIPPED.items():
        if options.target in name:
            print(f"{name} is skipped: there is no module {module}")
    targets = [target for target in TARGETS if options.target in target.name]
    if not targets:
        parser.error(f"--target {options.target}: choose from {', '.join(target.name for target in TARGETS)}")
    resource.setrlimit(resource.RLIMIT_AS, (options.memory << 30, options.memory << 30))
    faulthandler.enable()  # a crash shows what was called
    report, end = Report(), time.monotonic() + 60 * options.minutes
    print(f"seed {seed}, {len(targets)} targets, until {datetime.timedelta(minutes=options.minutes)} are over")
    while time.monotonic() < end:
        for target in targets:
            if time.monotonic() < end:
                report.run(target, options.round, seed)
        seed += 1
    print(report)
    if options.trace:
        for *_, trace in report.defects.values():
            print(trace)
    return 1 if report.defects else 0


if __name__ == "__main__":
    sys.exit(main())
