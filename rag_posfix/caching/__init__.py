"""Caching: what all caches share. A failing cache is a miss and never fails a request."""
