"""A session's events: written to `rank-N.log` and `rank-N.jsonl`, read back; its bar. May import `search`."""
