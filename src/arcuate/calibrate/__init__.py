"""A new day with a few labelled sentences: a session layer of its own for a model that is trained already."""
