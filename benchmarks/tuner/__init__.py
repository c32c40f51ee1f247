"""What the tuner costs, what its clock is worth, and what equal bits cost."""
