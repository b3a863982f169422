"""The wire formats: what requests may hold, what responses hold."""
