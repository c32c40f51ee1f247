"""Each operation of kernels/, against the libraries that do the same."""
