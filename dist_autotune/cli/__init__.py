"""The command `dist-autotune`: run, report, replay, the cache and the doctor. May import every room."""
