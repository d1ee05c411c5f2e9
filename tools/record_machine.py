# SPDX-License-Identifier: Apache-2.0
"""Record on a GPU what the cases of ``tests/machine`` return there: ``python -m tools.record_machine FILE``.

With ``--check`` each case is computed by ``simulate`` as well, and those that differ are printed. The file holds the
GPU's name, versions and a hash of every case's bits.

With ``--log`` the file is a trace of a model on a GPU, and OTHER one of the same model on a CPU, both by ``fmtsim trace
--level aten``: operators that only one of them calls are printed side by side. Such a fork by device is what
``simulate`` has to take on a CPU, too.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import torch

from fmtsim.lab.analysis.trace import Operation, Trace
from fmtsim.machine.simulate import simulate
from fmtsim.support.errors import ArgumentError
from tests.machine.cases import all_cases, digest


def main(arguments: list[str] | None = None) -> int:
    """Record, and with ``--check`` compare; return 1 where a case differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_machine", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="compute each case by simulate, too")
    parser.add_argument("--log", type=Path, metavar="OTHER", help="compare the operators of two traces; needs no GPU")
    options = parser.parse_args(arguments)
    if options.log is not None:
        forks = list(device_forks(Trace.load(options.file), Trace.load(options.log)))
        print("\n".join(forks) or "both call the same operators")
        return int(bool(forks))
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


def device_forks(gpu: Trace, cpu: Trace) -> Iterator[str]:
    """Yield, for each place where two traces part, the operators that each calls there alone, with their shapes."""

    def called(one: Operation) -> str:
        shapes = " ".join(f"{x.dtype}{list(x.shape)}" for x in one.inputs)
        return f"{one.layer or '(model)'} {one.direction}: {one.operation} {shapes}"

    logs = [[called(one) for one in trace.operations] for trace in (gpu, cpu)]
    for kind, i, i_end, j, j_end in SequenceMatcher(None, *logs, autojunk=False).get_opcodes():
        if kind != "equal":
            lines = [("gpu  ", x) for x in logs[0][i:i_end]] + [("cpu  ", x) for x in logs[1][j:j_end]]
            yield "\n".join(side + text for side, text in lines)


if __name__ == "__main__":
    sys.exit(main())
