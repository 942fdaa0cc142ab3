"""What many runs say together: the list of runs, the diary, and whether a difference is real."""
