"""Evaluation of trained models: error rates, significance tests, tuning, system combination, rescoring, submissions."""
