"""Base of the overlapped operations: owning symmetric memory, pushing beside a kernel, waiting, and agreeing
on a collective instead.

May import `symm` and the modules beside the rooms.
"""
