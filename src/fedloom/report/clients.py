"""The table of the clients: what each holds and how well it is served, the worst first."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedloom.report.cells import Cell, Column, table_of
from fedloom.report.summary import RunSummary

if TYPE_CHECKING:
    import pandas

LISTED = 200  # clients in the table
LABELS = 4  # classes of a client that are named, those with the most samples first


@dataclass(frozen=True)
class Client:
    """One client: its training samples of each class, and shares of its own test samples that are
    classified right, by what they are the accuracies of; the last of these, or with several methods
    the mean, is its `score`.
    """

    number: int
    counts: Sequence[int]
    accuracies: Mapping[str, float]
    score: float | None


def worst_first(runs: Sequence[RunSummary]) -> list[Client]:
    """Return the clients of the first seed whose clients were measured, by their score; those not
    measured last, by samples.

    Of several methods: the accuracy of the model that a client would use; of one method, that of
    the global model beside it.
    """
    comparable = same_data(runs)
    if not comparable:
        return []
    several = len(comparable) > 1
    tables = {
        name: table for run in comparable for name, table in _accuracies(run, several).items()
    }
    clients = []
    for number, counts in enumerate(comparable[0].label_counts):
        accuracies = {name: table[number] for name, table in tables.items() if number in table}
        scored = list(accuracies.values()) if several else list(accuracies.values())[-1:]
        clients.append(
            Client(number, counts, accuracies, statistics.fmean(scored) if scored else None)
        )
    sign = 1 if comparable[0].metric.higher_is_better else -1
    return sorted(
        clients,
        key=lambda client: (
            client.score is None,
            sign * (client.score or 0.0),
            sum(client.counts),
            client.number,
        ),
    )


def same_data(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the runs, one a method, that share clients and samples with the first one whose
    clients were measured (or with the first whose label counts are known).
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
    """Return the title, which names the order, the table of what each client holds and how well it
    is served, and its caption.
    """
    clients, comparable, metric = worst_first(runs), same_data(runs), runs[0].metric
    names = list(dict.fromkeys(name for client in clients for name in client.accuracies))
    listed, several = clients[:LISTED], len(comparable) > 1
    scores = [("Mean", [client.score for client in listed])] if several and names else []
    scores += [(name, [client.accuracies.get(name) for client in listed]) for name in names]

    def counts(values: Sequence[int]) -> list[Cell]:
        return [Cell(f"{value:,}", value) for value in values]

    columns = {Column("Client", order="ascending"): counts([client.number for client in listed])}
    for name, values in scores:
        title = name + (", %" if metric.share else "")
        columns[Column(title, order="ascending")] = [
            Cell("") if value is None else Cell(metric.text(value, 1), value) for value in values
        ]
    samples = [sum(client.counts) for client in listed]
    columns[Column("Samples", order="ascending")] = counts(samples)
    if any(len(client.counts) > 1 for client in clients):
        classes = [sum(count > 0 for count in client.counts) for client in listed]
        columns[Column("Classes", order="ascending")] = counts(classes)
        columns[Column("Most frequent", order="")] = [
            Cell(_labels(client.counts, comparable[0].class_names)) for client in listed
        ]
    title = f"Clients, the {f'worst {metric.noun}' if names else 'fewest samples'} first"
    return (
        title,
        table_of(columns),
        _caption(comparable, len(clients), bool(names)) if clients else "",
    )


def _caption(comparable: Sequence[RunSummary], clients: int, measured: bool) -> str:
    run, several = comparable[0], len(comparable) > 1
    models = f"the {'' if several else 'global model and of the '}model that it would use{' with each method' * several}"
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
    """Return the latest accuracy of each client, by what it is the accuracy of."""
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
