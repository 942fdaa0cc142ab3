"""Readers of recordings: find the files of a release, and read them trial by trial.

`table.READERS` lists the layouts. Every file is treated as possibly damaged or hostile.
"""
