"""Live decoding: streaming decoder, endpointing, sources of bins, server and page, recordings."""
