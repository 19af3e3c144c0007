"""A run that makes a scan: prompt, generation, gradient passes, sequences."""
