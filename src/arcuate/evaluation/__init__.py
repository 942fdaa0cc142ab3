"""Error rates, significance tests, tuning, system combination and rescoring."""
