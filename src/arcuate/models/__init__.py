"""Models: everything deterministic between stored bins and log-probabilities."""
