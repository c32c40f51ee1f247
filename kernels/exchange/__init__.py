"""What overlapped operations share: owning symmetric memory, pulling and pushing beside a kernel, waiting.

May import `symm` and the modules beside the rooms.
"""
