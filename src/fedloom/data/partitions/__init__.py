"""The partitions: a file registers those that it holds."""
