"""The HTTP service: one server that clients of several wire formats talk to unchanged."""
