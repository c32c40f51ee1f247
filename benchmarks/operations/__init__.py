"""Parts of the operations' benchmarks: their harness and peers, a call's timeline and host time."""
