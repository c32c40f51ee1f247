"""The bits of a function's outputs: found in what it returns, hashed on their device, compared by digest."""
