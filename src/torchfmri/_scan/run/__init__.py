"""Scanning: a language model generates under watch and is run once with gradients."""
