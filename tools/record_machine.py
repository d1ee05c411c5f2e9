# SPDX-License-Identifier: Apache-2.0
"""Record on a GPU what the cases of ``tests/machine`` return there: ``python -m tools.record_machine FILE``.

With ``--check`` each case is computed by ``simulate`` as well, and those that differ are printed. The file holds the
GPU's name, versions and a hash of every case's bits.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from fmtsim.machine.simulate import simulate
from fmtsim.support.errors import ArgumentError
from tests.machine.cases import all_cases, digest


def main(arguments: list[str] | None = None) -> int:
    """Record, and with ``--check`` compare; return 1 where a case differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_machine", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compute each case by simulate, too")
    options = parser.parse_args(arguments)
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cases": {},
    }
    wrong = 0
    for case in all_cases():
        bits = record["cases"][case.name] = digest(*case.call("cuda"))
        if options.check:
            try:
                with simulate(target="h200", strict=True):
                    same = digest(*case.call("cpu")) == bits
            except ArgumentError as refusal:
                print(f"{case.name}: {refusal}", flush=True)
                continue
            wrong += not same
            if not same:
                print(f"{case.name}: differs", flush=True)
    options.file.write_text(json.dumps(record, indent=0) + "\n", "utf-8")
    print(f"{len(record['cases'])} cases on {record['device']}; {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
