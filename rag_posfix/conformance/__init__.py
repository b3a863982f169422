"""Conformance: what authors of plug-ins run on them, as ``pytest --pyargs rag_posfix.conformance``."""
