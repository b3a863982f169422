"""API keys: who calls, what a caller may do and how much, and the file that keeps the keys."""
