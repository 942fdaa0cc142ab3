"""Trackers: the numbers of a run, shown by TensorBoard or Weights & Biases while it trains."""
