"""System combination: MBR, ROVER and log-linear choice over candidate texts, averages of frame log-probabilities."""
