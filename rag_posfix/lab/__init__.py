"""The laboratory: why the bias exists, on small decoders and on models; its files train decoders on tasks."""
