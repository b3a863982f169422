"""The laboratory: small decoders trained on generated tasks, one position encoding against another."""
