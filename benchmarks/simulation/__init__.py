"""Searches and whole sessions on made-up times, without kernels and ranks."""
