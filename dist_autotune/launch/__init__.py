"""Gives each launch its config. May import compilation, timing, storage, search and triton_api."""
