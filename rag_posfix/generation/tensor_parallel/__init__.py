"""Tensor parallelism: one model split over several processes."""
