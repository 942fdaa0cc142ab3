"""One factor at a time, in both directions, with seeds: which change caused the difference."""
