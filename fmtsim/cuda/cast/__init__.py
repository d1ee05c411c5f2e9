"""Kernels that turn tensors into values or codes of a format."""
