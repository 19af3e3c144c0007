"""Errors explained: what happened, in which layer and line, why, and how to cure it."""
