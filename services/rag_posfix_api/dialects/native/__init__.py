"""What no other wire format has: API keys, collections, order evaluation and information about the service."""
