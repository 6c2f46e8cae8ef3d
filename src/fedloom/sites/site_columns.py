"""Columns of a site's own table, for statistics before the sites have agreed on columns."""

from dataclasses import replace

import numpy as np
import torch

from fedloom.common.errors import InvalidValue, quoted
from fedloom.data.columns import TableInputs
from fedloom.data.partition import Partition, split_train_test
from fedloom.data.table_rows import table_dataset
from fedloom.runs.configuration import Configuration
from fedloom.sites.site_tables import csv_options, own_table, table_roles
from fedloom.survey.federated_statistics import Values, columns_of


def table_columns(configuration: Configuration, number: int, source: str) -> dict[str, Values]:
    """Return the columns of a site's table before the sites have agreed on columns.

    Args:
        configuration: Configuration of the federation.
        number: Number of the site.
        source: Path or function of the site's data.

    Returns:
        The columns of the training rows by name, the target last, as in `columns_of`.

    Raises:
        DataError: The data cannot be read.
        InvalidValue: The data are not a table, or have columns of texts, pictures or lists.
    """
    roles = table_roles(configuration)
    table = own_table(source, csv_options(configuration))
    if roles is None or table is None:
        raise InvalidValue(f"site {number}: {source} is not a table, but the federation's data are")
    roles = replace(roles, smallest=1)  # statistics leave out what too few rows have
    dataset = table_dataset("table", *table, roles, source)
    if not isinstance(dataset.encoding, TableInputs):
        needed = "need an example at the server: path in table(...)"
        raise InvalidValue(f"site {number}: texts and pictures in a table {needed}")
    if lists := [column.name for column in dataset.encoding.columns if column.width > 1]:
        remedy = "make a column of each number, or let all sites bring arrays"
        raise InvalidValue(
            f"site {number}: column {quoted(lists[0])} of {source} contains lists: {remedy}"
        )
    train = Partition.of([np.arange(len(dataset.train))])
    share = configuration.data.local_test
    if share is not None and not len(dataset.test):
        train, _ = split_train_test(train, configuration.seed, share)
    return columns_of(dataset, dataset.train[torch.from_numpy(train.indices)])
