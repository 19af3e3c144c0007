"""One scanned sequence, and what can be read from it."""
