"""The decorator, its calls and sessions: where all rooms below meet."""
