"""A scan on disk."""
