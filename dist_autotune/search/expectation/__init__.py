"""Expects times of a new key from those of the kernel's other keys: which to try, and when to stop."""
