"""Configuration, the training loop, metrics, resume."""
