"""Measurements that users can repeat: kernels as a ratio to a plain copy, start-up times, extra memory."""
