"""The algebra of per-token parameter gradients, which are never formed."""
