"""Measured figures with the ceilings of the same run: what ``headrace bench`` prints."""
