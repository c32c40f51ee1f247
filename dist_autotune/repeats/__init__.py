"""Repeats a call: puts state back between its runs, hands arguments out anew. May import launch."""
