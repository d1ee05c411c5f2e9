# SPDX-License-Identifier: Apache-2.0
"""The command line: one module a subcommand, each with ``add_arguments`` and ``run``."""
