# SPDX-License-Identifier: Apache-2.0
"""Measure matrix products: the same as ``fmtsim bench gemm``, for those who look for benchmarks here."""

import sys

from fmtsim.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "gemm", *sys.argv[1:]]))
