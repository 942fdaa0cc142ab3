"""Everything random that happens to bins, in training only."""
