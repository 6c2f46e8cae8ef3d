"""The data sets. Each file registers one or several."""
