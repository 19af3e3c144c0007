"""Per-token parameter gradients: their algebra, the rules per layer, and what captures them."""
