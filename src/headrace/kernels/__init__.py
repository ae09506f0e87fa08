"""Host kernels: the plain reference, and the checked wrapper around the compiled ones."""
