"""API keys: what is kept of a key, and the file that keeps the keys."""
