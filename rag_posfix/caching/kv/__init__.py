"""The passage KV store: keys and values of passages in memory, on disk and in Redis."""
