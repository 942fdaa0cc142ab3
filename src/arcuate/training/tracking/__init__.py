"""Trackers: the metrics of a run in TensorBoard or Weights & Biases while it trains."""
