"""The calls of a model, watched: one backward pass, every token."""
