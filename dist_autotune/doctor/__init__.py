"""Checks this machine and names the next step for each fault; may import tuner, and kernels."""
