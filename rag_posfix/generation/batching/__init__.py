"""Continuous batching: several requests share the decode steps of one model."""
