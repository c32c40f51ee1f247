"""How the ranks of a group exchange bytes, and how each wait ends.

May import errors, settings and formatting.
"""
