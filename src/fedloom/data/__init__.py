"""Data sets, partitions over clients, and what each client holds."""

from fedloom.data.dataset import Dataset, DataSpec, Samples, datasets
from fedloom.data.partition import Partition

__all__ = ["DataSpec", "Dataset", "Partition", "Samples", "datasets"]
