"""A scan on disk: written so that what is committed stays, and read as if an enemy wrote it.

`docs/store.md` describes the format. Folders written by earlier versions must still be read: names
may be added, none may change. `writer` and `stored_sequences` are the two ends; `export`, `tables`
and `variables` write for other programs.
"""
