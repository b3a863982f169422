"""The HTTP service: one server that clients of several API formats use unchanged."""
