"""Offline evaluation: records, journals and statistics that every experiment shares."""
