"""Pronunciation lexicons and n-gram language models."""
