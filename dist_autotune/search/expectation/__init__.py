"""What the other keys of a kernel tell of the candidates of a new one: which to try, and when to stop."""
