"""What we ask of PyTorch itself."""
