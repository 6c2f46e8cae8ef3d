"""The record of a round: its figures and its times, ready for JSON."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedloom.rounds.checkpoint import Record
from fedloom.rounds.delivery import Delivery, Polled
from fedloom.rounds.replies import RoundReplies


def timing(number: int, times: Mapping[str, float], observed: bool) -> Record:
    """Return the durations of a round that ends now, in seconds.

    Args:
        number: Number of the round.
        times: Values of `time.perf_counter` by event: the round `began`, the clients have
            `trained`, the observers have `observed`, the server has `received` the replies.
        observed: True if the round has observers.

    Returns:
        The line of `timings.jsonl`.
    """
    ended = time.perf_counter()
    line: Record = {
        "round": number,
        "ended": time.time(),
        "seconds": ended - times["began"],
        "train_seconds": times["trained"] - times["began"],
        "server_seconds": times["received"] - times["observed"],
        "evaluate_seconds": ended - times["received"],
    }
    if observed:
        line["record_seconds"] = times["observed"] - times["trained"]
    return line


def round_record(
    delivery: Delivery,
    answers: RoundReplies,
    polled: Polled,
    reported: Mapping[str, float],
    numbers: Sequence[int],
    under_way: frozenset[int],
) -> Record:
    """Return the participants, bytes, faults and mean client figures of a round.

    Args:
        delivery: Jobs of the round.
        answers: Replies of the clients.
        polled: Poll before the selection.
        reported: Figures of the parts by name.
        numbers: The user's number of each client.
        under_way: Clients of real sites that have trained since an earlier round.

    Returns:
        The beginning of the line of `metrics.jsonl`.
    """
    selection = delivery.exchange.selection
    poll_bytes = polled.bytes_down(delivery.exchange.wire, len(selection.clients))
    record: Record = {
        "round": delivery.exchange.round.number,
        "clients": [numbers[client] for client in selection.clients if client not in under_way],
        "bytes_down": delivery.bytes_down(len(under_way)) + poll_bytes,
        "bytes_up": answers.bytes + polled.bytes_up,
        "faults": [
            {"client": numbers[fault.job.client], "reason": fault.reason}
            for fault in delivery.faults
        ],
    }
    figures = {"simulated_seconds": delivery.seconds, **reported}
    if delivery.seconds is None:  # without a clock, parts report no time either
        del figures["simulated_seconds"]
    record |= figures
    for name, values in answers.metrics.items():
        record.setdefault(name, float(values[~values.isnan()].mean()))
    return record


def metrics_by_client(number: int, answers: RoundReplies, numbers: Sequence[int]) -> Record | None:
    """Return the clients' figures of training, such as those in `cohort.metrics`.

    Args:
        number: Number of the round.
        answers: Replies of the clients.
        numbers: The user's number of each client.

    Returns:
        The line of `client_metrics.jsonl`; None if the clients have only a training loss.
    """
    if not answers.metrics.keys() - {"training_loss"}:
        return None
    line: Record = {"round": number, "clients": [numbers[a.job.client] for a in answers.arrived]}
    for name, values in answers.metrics.items():
        line[name] = [finite(value) for value in values.tolist()]
    return line


def finite(value: Any) -> Any:
    """Return a figure, or None if it is infinite or NaN: JSON has neither."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
