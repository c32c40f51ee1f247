"""What a session writes to `rank-N.log` and `rank-N.jsonl`, and how it is read. Never imports storage."""
