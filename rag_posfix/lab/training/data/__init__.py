"""Training data (IN2): answers depend on short segments at uniformly drawn positions."""
