"""The calls of a model, watched during the user's own passes (`per="position"`)."""
