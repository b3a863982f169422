"""Caching: answers kept in memory, on disk and in Redis. A failing cache never fails a request."""
