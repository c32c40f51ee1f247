"""Which plans of a step are worth a run: the space of plans, and the search in it; no contexts, no ranks."""
