"""Bins in, text out, while they come: the streaming decoder, the server, its sources, its recordings."""
