"""What a model costs, and what would help: counted, timed and tried on the user's own model."""
