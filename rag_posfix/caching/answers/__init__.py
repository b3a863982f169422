"""The answer cache: finished answers in memory, on disk and in Redis."""
