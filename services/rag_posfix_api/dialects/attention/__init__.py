"""Attention: how much the unmodified model attends to each passage. A format of this service."""
