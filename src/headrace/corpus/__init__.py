"""Point-in-time corpora: documents, cutoffs, duplicates, manifests."""
