# SPDX-License-Identifier: Apache-2.0
"""What quantisation did: statistics of operands, observation of models, plots; what a library does with a batch."""

from fmtsim.lab.analysis.gemm_scan import GemmScan, scan_gemm
from fmtsim.lab.analysis.invariance import BatchInvariance, batch_invariance
from fmtsim.lab.analysis.mismatch import Mismatch, explain_mismatch

__all__ = ["BatchInvariance", "GemmScan", "Mismatch", "batch_invariance", "explain_mismatch", "scan_gemm"]
