"""Prefill: reading prompts, in runs or passage by passage, with keys and values that were kept."""
