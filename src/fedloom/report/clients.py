"""The table of the clients: what each holds and how well it is served, the worst first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedloom.report.cells import Cell, Column, Filled, Table
from fedloom.report.summary import RunSummary

LISTED = 200
"""Clients that the table lists."""

LABELS = 4
"""Classes of a client that are named, those with the most samples first."""


@dataclass(frozen=True)
class Client:
    """One client: its training samples of each class, and shares of its own test samples that are classified right, by what
    they are the accuracies of; the last of these, or with several methods the mean, is its `score`."""

    number: int
    counts: Sequence[int]
    accuracies: Mapping[str, float]
    score: float | None


def worst_first(runs: Sequence[RunSummary]) -> list[Client]:
    """The clients of the first seed whose clients were measured, by their score; those not measured last, by samples.

    Several methods: of each the accuracy of the model that a client would use (`personal`), after the last round in which it
    was measured. One method: beside it, that of the global model (`client`). Methods count that ran on the same data.
    """
    chosen = same_data(runs)
    if not chosen:
        return []
    tables = {name: table for run in chosen for name, table in _accuracies(run, len(chosen) > 1).items()}
    found = []
    for number, counts in enumerate(chosen[0].label_counts):
        known = {name: table[number] for name, table in tables.items() if number in table}
        judged = list(known.values()) if len(chosen) > 1 else list(known.values())[-1:]
        found.append(Client(number, counts, known, statistics.fmean(judged) if judged else None))
    sign = 1 if chosen[0].metric.higher_is_better else -1
    return sorted(found, key=lambda one: (one.score is None, sign * (one.score or 0.0), sum(one.counts), one.number))


def same_data(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """The runs, one a method, that share clients and samples with the first one whose clients were measured (or with the first
    whose label counts are known)."""
    known = [run for run in runs if run.label_counts]
    leader = next((run for run in known if run.clients), known[0] if known else None)
    if leader is None:
        return []
    alike = [run for run in known if run.seed == leader.seed and run.label_counts == leader.label_counts]
    return list({run.algorithm: run for run in reversed(alike)}.values())[::-1]


def client_table(runs: Sequence[RunSummary]) -> Table:
    """What each client holds and how well it is served, the worst first; no lines where nothing is known of the clients."""
    clients, names, several = _known(runs)
    metric, classes = runs[0].metric, any(len(one.counts) > 1 for one in clients)
    unit = ", %" if metric.share else ""
    listed = clients[:LISTED]
    scores = [("Mean", [one.score for one in listed])] if several and names else []
    scores += [(name, [one.accuracies.get(name) for one in listed]) for name in names]

    def counts(title: str, values: Sequence[int], form: str = "") -> Filled:
        return Column(title, order="ascending"), [Cell(f"{value:{form}}", value) for value in values]

    filled = [counts("Client", [one.number for one in listed])]
    for name, values in scores:
        cells = [Cell("", None) if value is None else Cell(metric.text(value, 1), value) for value in values]
        filled.append((Column(f"{name}{unit}", order="ascending"), cells))
    filled.append(counts("Samples", [sum(one.counts) for one in listed], ","))
    if classes:
        class_names = same_data(runs)[0].class_names
        labels = [Cell(_labels(one.counts, class_names), None) for one in listed]
        filled.append(counts("Classes", [sum(count > 0 for count in one.counts) for one in listed]))
        filled.append((Column("Most frequent", order=""), labels))
    return Table.of(filled)


def client_title(runs: Sequence[RunSummary]) -> str:
    """What the clients are sorted by."""
    measured = any(one.score is not None for one in worst_first(runs))
    return f"Clients, the worst {runs[0].metric.noun} first" if measured else "Clients, the fewest samples first"


def client_caption(runs: Sequence[RunSummary]) -> str:
    """How to read the table; empty where nothing is known of the clients."""
    clients, names, several = _known(runs)
    if not clients:
        return ""
    first = same_data(runs)[0]
    wrong = f", by the labels given, of which {first.wrong_labels:,} are wrong" if first.wrong_labels else ""
    each = " of each class" if len(clients[0].counts) > 1 else ""
    text = f"Training samples{each}{wrong}; seed {first.seed}."
    if not names:
        text += " No accuracies: they need local test data (local_test) and personal_every."
    elif several:
        text += f" {first.metric.title} on the client's own test data, of the model that it would use with each method."
    else:
        text += f" {first.metric.title} on the client's own test data, of the global model and of the model that it would use."
    return text + (f" The first {LISTED} of {len(clients):,} clients." if len(clients) > LISTED else "")


def _known(runs: Sequence[RunSummary]) -> tuple[list[Client], list[str], bool]:
    """The clients, what their accuracies are of, and whether these are several methods."""
    clients = worst_first(runs)
    return clients, list(dict.fromkeys(name for one in clients for name in one.accuracies)), len(same_data(runs)) > 1


def _accuracies(run: RunSummary, several: bool) -> dict[str, dict[int, float]]:
    """The latest accuracy of each client, by what it is the accuracy of."""
    last = run.clients[-1] if run.clients else {}
    tables = {
        kind: dict(zip(table["clients"], table[run.metric.name], strict=True))
        for kind, table in last.items()
        if kind != "round"
    }
    own = tables.get("personal", {}) | tables.get("new_client", {})
    return {run.algorithm: own} if several else {"Global model": tables.get("client", {}), "Own model": own}


def _labels(counts: Sequence[int], class_names: Sequence[str] | None) -> str:
    """The client's classes with their samples, the most frequent first."""
    order = sorted((k for k, count in enumerate(counts) if count), key=lambda k: (-counts[k], k))
    named = [f"{class_names[k] if class_names else k}\u00a0({counts[k]:,})" for k in order[:LABELS]]
    return ", ".join(named) + (f" and {len(order) - LABELS} more" if len(order) > LABELS else "")
