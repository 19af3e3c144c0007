"""The gradient of each token's own loss (`per="token_loss"`)."""
