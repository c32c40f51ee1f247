"""Runs a program unchanged and tunes it from step to step: what `dist-autotune run` does."""
