"""Caching: tiers in memory, on disk and in Redis. A failing tier is a miss and never fails a request."""
