"""Whether backward passes are right: measured layer by layer on the user's own model."""
