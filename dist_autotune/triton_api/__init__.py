"""Triton's Autotuner: what is known of it, and what stands in for its `run`. Imports no other room."""
