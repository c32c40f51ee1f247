"""From a launch of the user to one launch of the kernel.

May import compilation, timing, storage, search and triton_api.
"""
