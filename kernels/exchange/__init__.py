"""What overlapped operations share: owning symmetric memory, pulling and pushing beside a kernel, waiting,
and leaving a call to a collective.

May import `symm` and the modules beside the rooms.
"""
