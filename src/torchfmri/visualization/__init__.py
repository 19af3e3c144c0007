"""Pictures of what was captured; matplotlib is imported only when one is drawn."""
