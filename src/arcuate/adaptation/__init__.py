"""Following a day that drifts, without labels: what a decoder may learn from the trials it has just read."""
