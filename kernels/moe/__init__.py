"""What `AllGatherMoE` and `MoEReduceScatter` share: who has which tokens, sorting them, tables of tiles.

A *choice* is one (token, expert) pair: token t of all ranks, rank by rank, has choices t * topk + j.
"""
