"""Patching: the attention hook in transformers models, the only room that touches its internals."""
