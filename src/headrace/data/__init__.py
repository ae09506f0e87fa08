"""Datasets as token rows, packed into micro-batches in a resumable order."""
