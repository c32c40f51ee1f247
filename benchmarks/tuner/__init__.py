"""What the tuner costs, and what its clock is worth."""
