"""Decoding: sampling, combining rows, streaming text, and which passage each token comes from."""
