"""`python -m dist_autotune` is `dist-autotune`."""

from .cli import main

main()
