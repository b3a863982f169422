"""Probes: measurements of what a loaded model does with positions. They change nothing."""
