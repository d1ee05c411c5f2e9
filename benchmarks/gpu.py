# SPDX-License-Identifier: Apache-2.0
"""Measure the CUDA engine: the same as ``fmtsim bench gpu``, for those who look for benchmarks here."""

import sys

from fmtsim.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gpu", *sys.argv[1:]]))
