"""Parts of the operations' benchmarks: their harness and peers, and a call's host time."""
