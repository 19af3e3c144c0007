"""What is left when the model is gone."""
