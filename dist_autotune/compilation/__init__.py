"""Compiles and loads candidates before they are tried, in child processes. May import search, triton_api."""
