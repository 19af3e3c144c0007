"""The algebra of token gradients: factors, their norms and products, and the results."""
