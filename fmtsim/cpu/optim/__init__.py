"""Kernels that do a step of an optimizer."""
