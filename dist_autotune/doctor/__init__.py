"""What works on this machine, and the next step where something does not; may import tuner, and kernels."""
