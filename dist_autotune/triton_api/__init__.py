"""The only room that knows Triton's Autotuner. Imports errors alone."""
