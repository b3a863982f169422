"""Patching: the only room that touches transformers' internals. Installs the seam and checks it."""
