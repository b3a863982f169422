"""Benchmarks: ratios against the unmodified model, both in one run. Never asserted in tests."""
