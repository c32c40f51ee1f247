"""Times launches and runs on this rank, and keeps the times true. Returns numbers, not messages."""
