"""The federated algorithms, one file each. Each file registers its algorithms."""
