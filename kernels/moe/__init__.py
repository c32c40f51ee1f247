"""The operations over experts, and the parts they share: announcing choices, sorting them, tables of tiles.

May import `gemm`, `exchange`, `symm` and the modules beside the rooms. A *choice* is one (token,
expert) pair: token t of all ranks, rank by rank, has choices t * topk + j.
"""
