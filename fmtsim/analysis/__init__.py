"""What quantisation did: statistics of operands, observation of models, plots; what a library does with a batch."""

from fmtsim.analysis.invariance import BatchInvariance, batch_invariance

__all__ = ["BatchInvariance", "batch_invariance"]
