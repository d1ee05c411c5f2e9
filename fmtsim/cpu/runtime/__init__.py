"""How numba kernels are compiled, kept on disk and spread over threads."""
