"""headrace: train all the weights of a large model, and prove what it knows of the future."""

__version__ = "0.1.0"
