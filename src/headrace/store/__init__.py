"""The state of a model: where every byte lives, and how it gets on and off the disk."""
