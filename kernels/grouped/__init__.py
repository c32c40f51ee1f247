"""A grouped GEMM for Hopper: the roles of `gemm` with rows that lie anywhere, gathered and stored one by one.

May import `gemm` and the modules beside the rooms.
"""
