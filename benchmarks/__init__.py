"""Scripts that print every figure of the documents, beside the ceilings of the same run."""
