"""The record of a round: its figures and its times, ready for JSON."""

import math
import time
from collections.abc import Sequence
from typing import Any

from fedloom.rounds.checkpoint import Record
from fedloom.rounds.delivery import Delivery, Polled
from fedloom.rounds.replies import RoundReplies


class Stopwatch:
    """Takes the times of a round: training, recording, the server's step, evaluation."""

    def __init__(self) -> None:
        self._laps = {"began": time.perf_counter()}

    def lap(self, name: str) -> None:
        """Note the end of a phase."""
        self._laps[name] = time.perf_counter()

    def timing(self, number: int, observed: bool) -> Record:
        """Return the times of a round that ends now, in seconds."""
        laps, ended = self._laps, time.perf_counter()
        timing: Record = {
            "round": number,
            "ended": time.time(),
            "seconds": ended - laps["began"],
            "train_seconds": laps["trained"] - laps["began"],
            "server_seconds": laps["received"] - laps["observed"],
            "evaluate_seconds": ended - laps["received"],
        }
        if observed:
            timing["record_seconds"] = laps["observed"] - laps["trained"]
        return timing


def round_record(
    delivery: Delivery,
    answers: RoundReplies,
    polled: Polled,
    numbers: Sequence[int],
    under_way: frozenset[int],
) -> Record:
    """Return who took part in a round, what travelled, and who did not reply.

    Args:
        delivery: The work that went out.
        answers: The replies.
        polled: The poll before the selection.
        numbers: The clients' numbers for the user.
        under_way: Clients that have trained since an earlier round, over real sites.

    Returns:
        The beginning of the line of `metrics.jsonl`.
    """
    selection = delivery.exchange.selection
    asked = polled.bytes_down(delivery.exchange.wire, len(selection.clients))
    return {
        "round": delivery.exchange.round.number,
        "clients": [numbers[client] for client in selection.clients if client not in under_way],
        "bytes_down": delivery.bytes_down(len(under_way)) + asked,
        "bytes_up": answers.bytes + polled.bytes_up,
        "faults": [
            {"client": numbers[fault.job.client], "reason": fault.reason}
            for fault in delivery.faults
        ],
    }


def finite(value: Any) -> Any:
    """Return a figure, or None if it is infinite or undefined, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
