"""Rescoring of n-best lists with a causal language model."""
