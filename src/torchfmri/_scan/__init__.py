"""Scans: a language model watched token by token, kept, read and drawn."""
