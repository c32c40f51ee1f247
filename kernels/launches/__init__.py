"""Launches of a tuned kernel, each way shorter than the one before it. May import no other room.

loading    by the tuner: Autotuner, the config's blocks in new descriptors, the kernel. The first calls of
           a shape
settled    config, compiled kernel and grid as the tuning left them
prepared   what launches of a compiled kernel share is made once; where it is known, Triton's launcher in C
           is called directly
"""
