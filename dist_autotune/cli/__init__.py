"""The command `dist-autotune`: reports, replay, the cache and the doctor. May import every room."""
