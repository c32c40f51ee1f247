"""The command `dist-autotune`. May import every room."""
