"""The loaded model: tokenizer, packaged weights, KV cache, and batches of sequences on it."""
