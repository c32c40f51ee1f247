"""What to try next, and what wins: state that the deciding rank holds. Imports no torch or Triton."""
