"""The phases of a session: each plans the runs while it is under way. A part of `search`."""
