"""The answer cache: finished answers as bytes in tiers."""
