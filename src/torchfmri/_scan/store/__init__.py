"""A scan on disk: written so that what is committed stays, and read as if an enemy wrote it."""
