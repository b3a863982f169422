"""The passage KV store: keys and values of passages in tiers."""
