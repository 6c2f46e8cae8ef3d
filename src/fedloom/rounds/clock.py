"""The simulated clock: duration of each client's work.

It depends only on counted samples and counted bytes, so it is exact and reproducible.
"""

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from pydantic import Field

from fedloom.common.errors import DataError, FedloomError, InvalidValue, quoted
from fedloom.common.expression import parse
from fedloom.common.fields import LARGEST, Positive, require_between, require_fields
from fedloom.common.randomness import numpy_stream
from fedloom.common.registry import Registry
from fedloom.data.formats.limits import read_text

DAY = 86_400.0

TRACE_SHARE = 1 / 64
"""Largest size of a trace, as a share of the memory limit of a data set.

Parsed lines need much more memory than the file.
"""

SLOWEST = 1e-9
"""Smallest rate of a client, per second. Smaller rates would give infinite durations."""

PerSecond = Annotated[float, Field(ge=SLOWEST, le=LARGEST)]

Rate = Callable[[np.random.Generator], float]
"""Draws one client's rate, per second."""

_TRACE = dict.fromkeys(("speed", "down", "up"), (SLOWEST, math.inf)) | {
    "from": (0.0, 24.0),
    "hours": (SLOWEST, 24.0),
}
"""Columns of a trace, with their ranges."""

client_rates: Registry[Callable[..., Rate]] = Registry(
    "distribution of clients' rates", "fedloom.rounds"
)


@client_rates.register("lognormal")
def lognormal(*, median: PerSecond, sigma: Annotated[float, Field(ge=0, le=100)] = 1.0) -> Rate:
    """median exp(sigma n), n standard normal, but at least 1e-9.

    Args:
        median: Median rate, per second, at least 1e-9.
        sigma: Standard deviation of the rate's logarithm; 0 gives all clients one rate.

    Returns:
        A function that draws one client's rate, per second.
    """
    return lambda generator: min(
        max(median * math.exp(min(sigma * generator.standard_normal(), 600.0)), SLOWEST), LARGEST
    )


@client_rates.register("stragglers")
def stragglers(*, fastest: PerSecond, times: Annotated[float, Field(ge=1, le=1e9)] = 10.0) -> Rate:
    """fastest / u, u uniform in [1, times]: the slowest client is `times` slower.

    Args:
        fastest: Rate of the fastest client, per second, at least 1e-9.
        times: Ratio of the fastest rate to the slowest, at least 1.

    Returns:
        A function that draws one client's rate, per second.
    """
    return lambda generator: fastest / generator.uniform(1, times)


@client_rates.register("fedscale")
def fedscale() -> Rate:
    """Samples per second of FedScale's clients: 0.005 exp(1 + 0.6 n) seconds a sample, n standard
    normal.

    FedScale publishes a trace of bandwidths, but no distribution.
    Source: FedScale (Lai et al. 2022), `get_completion_time_lognormal` in its client_metadata.py,
    after PAPAYA.
    """
    return lambda generator: 1 / (0.005 * math.exp(1 + 0.6 * generator.standard_normal()))


@dataclass(frozen=True)
class Device:
    """The device of one client.

    Attributes:
        speed: Training samples per second.
        down: Downloaded bytes per second.
        up: Uploaded bytes per second.
        start: Hour of the day at which the device begins to work.
        hours: Working hours per day.
    """

    speed: float
    down: float
    up: float
    start: float
    hours: float

    def finish(self, began: float, samples: float, bytes_down: float, bytes_up: float) -> float:
        """Return the time at which work is done, in seconds.

        The work takes bytes_down / down + samples / speed + bytes_up / up seconds. Outside its
        working hours the device waits.

        Args:
            began: Time at which the work begins, in seconds.
            samples: Number of training samples, with repetitions.
            bytes_down: Size of the download.
            bytes_up: Size of the upload.

        Returns:
            Time, in seconds since the beginning of the run.
        """
        work = bytes_down / self.down + samples / self.speed + bytes_up / self.up
        if self.hours >= 24:
            return began + work
        length = 3600 * self.hours
        opens = 3600 * self.start
        opened = began - (began - opens) % DAY  # beginning of the current or last working hours
        done = min(began - opened, length)  # seconds of these working hours that have passed
        if done >= length:
            opened = opened + DAY
            done = 0.0
        days = max(0, math.ceil((done + work) / length) - 1)
        return opened + days * DAY + done + work - days * length


@dataclass(frozen=True)
class Clock:
    """The table `[clock]`: speed of the clients, and waiting time of the server.

    The rates `speed`, `down` and `up` are a number for all clients, or a distribution:
    `lognormal(median, sigma)`, `stragglers(fastest, times)` or `fedscale` (only for `speed`). Each
    client's rate is drawn once from the run's seed. Without a rate, this work takes no time.

    A round ends when the slowest awaited reply arrives. Asynchronous methods (`fedbuff`) use late
    replies as stale replies.

    Args:
        speed: Training samples per second of a client.
        down: Downloaded bytes per second of a client.
        up: Uploaded bytes per second of a client.
        hours: Working hours per day of each client. They begin at an hour that is drawn uniformly
            for each client. Outside these hours the work waits.
        trace: CSV file with one line per client. Its columns replace the values of this table:
            `speed`, `down`, `up`, `from` (first working hour) and `hours`. If it has fewer lines
            than clients, the lines are repeated.
        deadline: Seconds after the beginning of a round after which replies are dropped.
        over_selection: With s, ceil((1 + s) K) clients are selected and the first K replies are
            used.
    """

    speed: PerSecond | str | None = None
    down: PerSecond | str | None = None
    up: PerSecond | str | None = None
    hours: Annotated[float, Field(gt=0, le=24)] = 24.0
    trace: str | None = None
    deadline: Positive | None = None
    over_selection: Annotated[float, Field(ge=0, le=100)] = 0.0

    def __post_init__(self) -> None:
        require_fields(self)
        for name in ("speed", "down", "up"):
            if isinstance(rate := getattr(self, name), str):
                try:
                    _rate(rate)
                except FedloomError as error:
                    raise InvalidValue(f"{name}: {error}") from None
        _ = self.lines
        if not self.runs and (self.deadline is not None or self.over_selection or self.hours < 24):
            raise InvalidValue(
                "the table [clock] needs the clients' speed, such as speed = 100 (samples per "
                "second), or a trace"
            )

    @property
    def lines(self) -> tuple[dict[str, float], ...]:
        """The entries of the trace, one per client. Raises `InvalidValue` if it cannot be read."""
        return () if self.trace is None else _lines(self.trace)

    @property
    def runs(self) -> bool:
        """Return True if anything takes time."""
        return any(rate is not None for rate in (self.speed, self.down, self.up, self.trace))

    def device(self, seed: int, client: int) -> Device:
        """Return the device of a client. It is the same in every round.

        Args:
            seed: Seed of the run.
            client: Number of the client.

        Returns:
            The device, from the client's line of the trace if there is a trace.
        """

        def drawn(name: str, rate: Any) -> float:
            if isinstance(rate, str):
                return float(_rate(rate)(numpy_stream(seed, f"clock {name}", client=client)))
            return math.inf if rate is None else float(rate)

        start = 24 * float(numpy_stream(seed, "clock hours", client=client).random())
        speed, down, up = (drawn(name, getattr(self, name)) for name in ("speed", "down", "up"))
        device = Device(speed, down, up, start, self.hours)
        return replace(device, **self.lines[client % len(self.lines)]) if self.lines else device

    def closes(self, now: float) -> float:
        """Return the time at which the server drops late replies of a round that begins `now`."""
        return math.inf if self.deadline is None else now + self.deadline

    def selected(self, replies: int, clients: int) -> int:
        """Return the number of clients to select.

        Args:
            replies: Number of replies that end a round.
            clients: Number of clients that train.

        Returns:
            `replies` plus the share `over_selection`, rounded up, at most `clients`.
        """
        return min(clients, math.ceil((1 + self.over_selection) * replies - 1e-9))


@cache
def _rate(text: str) -> Rate:
    return cast(Rate, client_rates.build(parse(text)))


@cache
def _lines(path: str) -> tuple[dict[str, float], ...]:
    """Return the lines of a trace. Raises `InvalidValue` with the line that cannot be read."""
    try:
        rows = list(csv.DictReader(read_text(Path(path), "trace", TRACE_SHARE).splitlines()))
    except (DataError, csv.Error) as error:
        raise InvalidValue(f"trace: {error}") from None
    if not rows:
        raise InvalidValue(
            f"trace: {path} has no clients: write a header with columns of {', '.join(_TRACE)}, "
            "and one line per client"
        )
    entries = []
    for number, row in enumerate(rows, start=2):
        for name, text in row.items():
            if name not in _TRACE:
                raise InvalidValue(
                    f"trace: {path} has an unknown column {quoted(name)}: "
                    f"allowed: {', '.join(_TRACE)}"
                )
            try:
                require_between(name, float(text), *_TRACE[name])
            except (TypeError, ValueError):
                raise InvalidValue(
                    f"trace: {path}, line {number}: {name} cannot be {quoted(text)}"
                ) from None
        entries.append(
            {"start" if name == "from" else name: float(text) for name, text in row.items()}
        )
    return tuple(entries)
