"""Word n-gram models: import, estimation, interpolation, memory-mapped files, compiled queries."""
