"""MCP: ``search`` and ``ask`` as tools of agents, and passages as resources, on the official SDK."""
