# SPDX-License-Identifier: Apache-2.0
"""How a real number becomes one of a format's values: modes, random words, and an oracle in exact integers."""
