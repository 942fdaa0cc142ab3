"""Adaptation to new sessions: online without labels, calibration with a few labels, measures of drift."""
