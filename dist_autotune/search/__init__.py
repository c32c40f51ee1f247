"""What to try next, and what wins: pure state, equal on all ranks. Imports no torch, Triton or numpy."""
