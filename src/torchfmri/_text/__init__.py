"""Tables and words for terminals and notebooks."""
