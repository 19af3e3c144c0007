"""From one call of a layer to the factors of its parameters, by a rule or by tracking."""
