"""vLLM rerank and score."""
