"""The streamed training step."""
