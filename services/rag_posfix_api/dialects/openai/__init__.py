"""OpenAI chat completions, embeddings and models."""
