"""Anthropic messages, with documents and citations."""
