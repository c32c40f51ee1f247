"""Digests of a function's outputs, hashed on their device. May import timing and search."""
