"""Faults of the running service under load: Redis, the disk, clients, fuzzed requests, and memory."""
