"""Pure tensor functions, one file an operation: the equation, a plain PyTorch reference, and where it pays a kernel."""
