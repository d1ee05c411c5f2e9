# SPDX-License-Identifier: Apache-2.0
"""For tests of other projects: two runs, traces or models have the same bits, or the first difference is named."""

from fmtsim.lab.analysis.bisect import assert_same_bits as assert_same_bits
