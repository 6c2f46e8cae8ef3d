"""The data sets: one file each; a file registers what it holds."""
