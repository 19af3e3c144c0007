"""From one call of a layer to the terms of its parameters."""
