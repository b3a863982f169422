"""Services that run rag_posfix over the network."""
