# SPDX-License-Identifier: Apache-2.0
"""What numbers exist: records of formats, their catalogue and names, packing, and other libraries' types."""

from fmtsim.formats import registry as registry  # a Scaling reads names of formats, which are there from the start
