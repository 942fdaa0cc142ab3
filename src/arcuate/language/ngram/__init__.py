"""Word n-gram models: read, estimated, mixed, stored as arrays in one mapped file, asked in a compiled loop."""
