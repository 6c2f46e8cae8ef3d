"""Data sets, partitions over clients, and the samples of each client.

Data of a user take one way:

    source                   reader                                result
    files, frames, datasets  formats.arrow, `read_any`, `as_arrow` an Arrow table
    its columns              formats.arrow_columns                 types, empty cells, categories
    its roles                sets.table, `table_dataset`           inputs, target, groups, notices
    arrays, torch data sets  convert, sets.own, sets.foreign       `Samples`
    pictures                 formats.pictures, sets.normalisation  bytes and their scale
    all of them              dataset, preprocessing                tensors, and the way to them
"""

from fedloom.data.dataset import Dataset, DataSpec, Samples, datasets
from fedloom.data.partition import Partition

__all__ = ["DataSpec", "Dataset", "Partition", "Samples", "datasets"]
