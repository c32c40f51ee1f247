"""Compiles and loads candidates before they are tried, in child processes. May import triton_api."""
