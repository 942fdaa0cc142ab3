"""CTC word search over a lexicon tree with an n-gram language model."""
