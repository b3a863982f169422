"""Text Embeddings Inference (TEI) rerank, and vLLM's body on the same path."""
