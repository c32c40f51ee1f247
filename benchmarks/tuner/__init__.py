"""What the tuner costs, what its clock is worth, and what it does to programs of others."""
