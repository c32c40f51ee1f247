"""Runs a program unchanged and tunes it from step to step: `dist-autotune run`. May import tuner."""
