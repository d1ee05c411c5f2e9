# SPDX-License-Identifier: Apache-2.0
"""The laboratory: what looks at results, and the jobs behind the command line. Nothing outside imports it."""
