"""The Inspector: run once, read what happened inside."""
