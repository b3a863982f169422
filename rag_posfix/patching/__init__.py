"""Patching: the attention hook in transformers models, the only package that touches their internals."""
