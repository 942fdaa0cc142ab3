"""Recipes and run folders: the packages above wired into training runs, sweeps and ablations."""
