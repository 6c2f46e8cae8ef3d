"""The partitions: one file each; a file registers what it holds."""
