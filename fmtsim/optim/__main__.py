# SPDX-License-Identifier: Apache-2.0
"""Print the table of schemes: ``python -m fmtsim.optim``."""

from fmtsim.optim.catalogue import scheme_table

if __name__ == "__main__":
    print(scheme_table())
