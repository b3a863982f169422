"""API keys: their digests, and the key file."""
