"""Triton kernels for CUDA. Nothing here is imported where there is no GPU; the plain torch code is the reference."""
