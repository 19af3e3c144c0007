"""One scanned sequence: its layers and voxels, its tokens, and what can be read from it.

Everything else of this room uses these files, and they use none of it. They need numpy only, so a
scan can be read where the model, transformers and a GPU are not.
"""
