"""Layers and training steps: several kernels beside each other and beside collectives."""
