"""The operations over experts, and what they share: who has which tokens, sorting them, tables of tiles.

May import `gemm`, `exchange`, `symm` and the modules beside the rooms. A *choice* is one (token,
expert) pair: token t of all ranks, rank by rank, has choices t * topk + j.
"""
