"""Training data: questions whose answers depend on short segments at uniform places (IN2)."""
