# SPDX-License-Identifier: Apache-2.0
"""What every room may use: errors, records, files, progress, tables, plots."""
