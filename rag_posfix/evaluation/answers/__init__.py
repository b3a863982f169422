"""Answer experiments: how answers change with the position and the order of the passages."""
