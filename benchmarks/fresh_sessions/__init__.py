"""Parts of `regret`: how much slower the picks of fresh sessions are than the best there is."""
