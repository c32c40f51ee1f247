"""The command `dist-autotune`: run, report, the cache and the doctor. May import every room."""
