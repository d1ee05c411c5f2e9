# SPDX-License-Identifier: Apache-2.0
"""What quantisation did: statistics of operands, observation of models, plots; what a library does with a batch."""

from fmtsim.lab.analysis.gemm_scan import GemmScan, scan_gemm
from fmtsim.lab.analysis.invariance import BatchInvariance, batch_invariance

__all__ = ["BatchInvariance", "GemmScan", "batch_invariance", "scan_gemm"]
