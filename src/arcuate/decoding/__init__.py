"""Log-probabilities to tokens and words."""
