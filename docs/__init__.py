"""What keeps the documentation true: generated pages and figures."""
