"""The methods: one short file each; a file registers what it holds."""
