"""The events of a session: written to `rank-N.log` and `rank-N.jsonl`, and read back. May import `search`."""
