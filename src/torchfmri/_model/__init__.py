"""Somebody's model: its names, and running it without leaving a trace."""
