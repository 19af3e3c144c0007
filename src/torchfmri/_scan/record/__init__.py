"""One scanned sequence: its layers and voxels, its tokens, and what can be read from it."""
