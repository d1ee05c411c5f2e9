# SPDX-License-Identifier: Apache-2.0
"""Run the command line as ``python -m fmtsim``."""

import sys

from fmtsim.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
