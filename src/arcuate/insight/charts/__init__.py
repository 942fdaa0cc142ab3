"""Charts: Altair specifications with one theme, built from plain values; the pages and notebooks use the same ones."""
