"""Data sets, partitions over clients, and what each client holds."""

from fedloom.data.dataset import DataSpec, Dataset, Samples, datasets
from fedloom.data.partition import Partition, partitions

__all__ = ["DataSpec", "Dataset", "Partition", "Samples", "datasets", "partitions"]
