"""The gradient of every token's own loss."""
