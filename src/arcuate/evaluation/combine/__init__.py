"""Several readings of one trial into one text: least expected word errors, votes word by word, mean frame scores."""
