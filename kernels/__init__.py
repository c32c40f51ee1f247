"""Workloads that overlap communication with computation, built on Triton and symmetric memory.

Import an operation from its own module, for example `dist_autotune.kernels.ag_gemm.AllGatherGemm`.
"""
