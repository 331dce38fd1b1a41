"""Work on text that may be dear: what is to be done, and where."""
