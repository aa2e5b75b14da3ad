"""Kernels: attention over the pairs that a plan keeps, for each kind of device."""
