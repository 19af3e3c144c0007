"""A Monitor inside other people's training loops and loggers; each needs its own package."""
