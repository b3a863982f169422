"""Prefill: reading prompts, whole or passage by passage, with keys and values that were kept."""
