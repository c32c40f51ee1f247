"""What the hosts of ranks tell each other: by which way a call is made, and which calls have failed."""
