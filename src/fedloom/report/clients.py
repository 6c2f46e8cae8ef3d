"""The table of the clients: their data and the accuracy of their models, the worst first."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedloom.common.errors import shortened
from fedloom.report.cells import Cell, Column, table_of
from fedloom.report.summary import RunSummary

if TYPE_CHECKING:
    import pandas

LISTED = 200  # clients in the table
LABELS = 4  # classes of a client that are named, those with the most samples first


def worst_first(runs: Sequence[RunSummary]) -> "tuple[pandas.DataFrame, pandas.Series]":
    """Return the clients of the first seed with measured clients, sorted by their score.

    Clients that were not measured are last, by samples.

    Args:
        runs: Runs of one or more methods on the same task.

    Returns:
        The accuracies by client, and the score. A column is a method, with the accuracy of the
        model that the client would use. For one method, the columns are the `Global model` and its
        `Own model`. The score is the mean of the columns, for one method the last of them. Both are
        empty if no run has label counts.
    """
    import pandas

    comparable = same_data(runs)
    if not comparable:
        return pandas.DataFrame(), pandas.Series()
    several = len(comparable) > 1
    tables = [pandas.DataFrame(_accuracies(run, several)) for run in comparable]
    counts = comparable[0].label_counts
    clients = pandas.concat(tables, axis=1).reindex(range(len(counts))).dropna(axis=1, how="all")
    score = clients.mean(axis=1) if several else clients.ffill(axis=1).iloc[:, -1:].max(axis=1)
    keys = pandas.DataFrame({"score": score, "samples": [sum(line) for line in counts]})
    lowest_first = comparable[0].metric.higher_is_better
    order = keys.sort_values(["score", "samples"], ascending=[lowest_first, True]).index
    return clients.loc[order], score.loc[order]


def same_data(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the runs, one a method, that share clients and samples with the first run that
    measured its clients, or with the first run that has label counts.
    """
    counted = [run for run in runs if run.label_counts]
    leader = next((run for run in counted if run.clients), counted[0] if counted else None)
    if leader is None:
        return []
    alike = [
        run
        for run in counted
        if run.seed == leader.seed and run.label_counts == leader.label_counts
    ]
    return list({run.algorithm: run for run in reversed(alike)}.values())[::-1]


def client_table(runs: Sequence[RunSummary]) -> "tuple[str, pandas.DataFrame, str]":
    """Return the table of the clients' data and accuracies, with its title and caption.

    Args:
        runs: At least one run; as in `worst_first`.

    Returns:
        Title, table with a line for each of the first `LISTED` clients, and caption, "" without
        clients. Shares are in per cent.
    """
    (clients, score), comparable, metric = worst_first(runs), same_data(runs), runs[0].metric
    measured = len(clients.columns) > 0
    listed = clients.index[:LISTED]
    counts = [comparable[0].label_counts[number] for number in listed]
    names = [Cell(f"{number:,}", number) for number in listed]
    if comparable and comparable[0].client_names is not None:
        texts = [comparable[0].client_name(number) for number in listed]
        names = [Cell(shortened(text), text) for text in texts]
    columns = {Column("Client", order="ascending"): names}
    scores = [("Mean", score)] if measured and len(comparable) > 1 else []
    for name, values in (*scores, *clients.items()):
        title = f"{name}, %" if metric.share else name
        columns[Column(title, order="ascending")] = [
            Cell("") if math.isnan(value) else Cell(metric.text(value, 1), value)
            for value in values[listed]
        ]
    columns[Column("Samples", order="ascending")] = _counts(map(sum, counts))
    if comparable and len(comparable[0].label_counts[0]) > 1:
        classes = [sum(count > 0 for count in line) for line in counts]
        columns[Column("Classes", order="ascending")] = _counts(classes)
        labels = [_labels(line, comparable[0].class_names) for line in counts]
        columns[Column("Most frequent", order="")] = list(map(Cell, labels))
    title = f"Clients, the {f'worst {metric.noun}' if measured else 'fewest samples'} first"
    caption = _caption(comparable, len(clients), measured) if len(clients) else ""
    return title, table_of(columns), caption


def client_figures(run: RunSummary) -> "pandas.DataFrame":
    """Return the latest figures of each evaluated client of a run.

    Args:
        run: The run.

    Returns:
        A row for each client and model, with the columns `client`, `model`, `samples` and the
        figures.
    """
    import pandas

    tables = []
    for model, table in (run.clients[-1] if run.clients else {}).items():
        if model != "round":
            names = [run.client_name(client) for client in table["clients"]]
            figures = {name: values for name, values in table.items() if name != "clients"}
            tables.append(pandas.DataFrame({"client": names, "model": model, **figures}))
    return pandas.concat(tables, ignore_index=True) if tables else pandas.DataFrame()


def _counts(counts: Iterable[int]) -> list[Cell]:
    return [Cell(f"{count:,}", count) for count in counts]


def _caption(comparable: Sequence[RunSummary], clients: int, measured: bool) -> str:
    run, several = comparable[0], len(comparable) > 1
    models = (
        f"the {'' if several else 'global model and of the '}model that it would "
        f"use{' with each method' * several}"
    )
    wrong = (
        f", by the labels given, of which {run.wrong_labels:,} are wrong"
        if run.wrong_labels
        else ""
    )
    scores = "No accuracies: they need local test data (local_test) and personal_every."
    if measured:
        scores = f"{run.metric.title} on the client's own test data, of {models}."
    more = f" The first {LISTED} of {clients:,} clients." if clients > LISTED else ""
    return f"Training samples{wrong}; seed {run.seed}. {scores}{more}"


def _accuracies(run: RunSummary, several: bool) -> dict[str, dict[int, float]]:
    """Return the latest accuracy of each client, by the model that it describes."""
    tables = {
        kind: dict(zip(table["clients"], table[run.metric.name], strict=True))
        for kind, table in (run.clients[-1] if run.clients else {}).items()
        if kind != "round"
    }
    personal = tables.get("personal", {}) | tables.get("new_client", {})
    return (
        {run.algorithm: personal}
        if several
        else {"Global model": tables.get("client", {}), "Own model": personal}
    )


def _labels(counts: Sequence[int], class_names: Sequence[str] | None) -> str:
    order = sorted(
        (label for label, count in enumerate(counts) if count),
        key=lambda label: (-counts[label], label),
    )
    named = [
        f"{class_names[label] if class_names else label}\u00a0({counts[label]:,})"
        for label in order[:LABELS]
    ]
    return ", ".join(named) + (f" and {len(order) - LABELS} more" if len(order) > LABELS else "")
