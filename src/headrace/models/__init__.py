"""Hugging Face models taken apart into units that can be streamed."""
