"""How kernels are compiled, kept on disk, loaded and launched."""
