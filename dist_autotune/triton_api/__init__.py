"""All that depends on Triton's Autotuner, and the function in place of its `run`. Imports no other room."""
