"""Speed experiments: time to first token, tokens per second and memory against the stock model."""
