# SPDX-License-Identifier: Apache-2.0
"""PTX kernels with the bits of a GPU, on a CPU: ``fmtsim.launch``."""
