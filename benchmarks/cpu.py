# SPDX-License-Identifier: Apache-2.0
"""Measure the CPU engine: the same as ``fmtsim bench``, for those who look for benchmarks here."""

import sys

from fmtsim.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
