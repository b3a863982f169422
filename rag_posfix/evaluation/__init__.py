"""Offline evaluation: how much answers depend on the order of the passages."""
