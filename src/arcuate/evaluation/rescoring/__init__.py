"""n-best lists scored anew with a causal language model, and the weights between the sources of a score."""
