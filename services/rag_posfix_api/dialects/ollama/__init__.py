"""Ollama chat and tags."""
