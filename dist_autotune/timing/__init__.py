"""How a launch is timed on this rank, and what keeps the times true. May import search."""
