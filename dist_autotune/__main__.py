"""`python -m dist_autotune` is `dist-autotune`."""

from .cli.commands import main

main()
