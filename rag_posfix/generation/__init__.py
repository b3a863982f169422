"""Generation: loading models and running plans on them."""
