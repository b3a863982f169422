"""OpenAI chat completions and models."""
