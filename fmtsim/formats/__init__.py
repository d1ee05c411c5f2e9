# SPDX-License-Identifier: Apache-2.0
"""What numbers exist: records of formats, their catalogue and names, packing, and other libraries' types."""
