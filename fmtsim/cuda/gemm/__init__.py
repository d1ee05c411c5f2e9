"""Kernels that multiply matrices as emulated units do."""
