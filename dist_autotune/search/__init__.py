"""Chooses trials and winners: state that the deciding rank holds. Imports no torch or Triton."""
