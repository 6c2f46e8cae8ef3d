"""The simulated clock: how long each client's work takes, from counted samples and counted bytes
alone, so that it is exact.
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

from fedloom.config.expression import parse
from fedloom.config.fields import LARGEST, Positive, require_between, require_fields
from fedloom.config.registry import Registry
from fedloom.data.formats.limits import read_text
from fedloom.errors import DataError, FedloomError, InvalidValue, quoted
from fedloom.randomness import numpy_stream

DAY = 86_400.0

SHARE_OF_TRACE = 1 / 64
"""Of the memory of a data set, how much a trace may have: its lines take many times as much when
they are read.
"""

SLOWEST = 1e-9
"""Smallest rate of a client, per second: with smaller ones seconds become infinite."""

PerSecond = Annotated[float, Field(ge=SLOWEST, le=LARGEST)]

Rate = Callable[[np.random.Generator], float]
"""Draws one client's rate, per second."""

_TRACE = dict.fromkeys(("speed", "down", "up"), (SLOWEST, math.inf)) | {
    "from": (0.0, 24.0),
    "hours": (SLOWEST, 24.0),
}
"""Columns of a trace, and the range of each."""

client_rates: Registry[Callable[..., Rate]] = Registry(
    "distribution of clients' rates", "fedloom.rounds"
)


@client_rates.register("lognormal")
def lognormal(*, median: PerSecond, sigma: Annotated[float, Field(ge=0, le=100)] = 1.0) -> Rate:
    """median exp(sigma n), n standard normal, but at least 1e-9."""
    return lambda draws: min(
        max(median * math.exp(min(sigma * draws.standard_normal(), 600.0)), SLOWEST), LARGEST
    )


@client_rates.register("stragglers")
def stragglers(*, fastest: PerSecond, times: Annotated[float, Field(ge=1, le=1e9)] = 10.0) -> Rate:
    """fastest / u with u uniform in [1, times]: the slowest takes that many times as long."""
    return lambda generator: fastest / generator.uniform(1, times)


@client_rates.register("fedscale")
def fedscale() -> Rate:
    """Samples per second of FedScale's clients: 0.005 exp(1 + 0.6 n) seconds a sample, n standard
    normal.

    Source: FedScale (Lai et al. 2022), `get_completion_time_lognormal` in its client_metadata.py,
    after PAPAYA. Of bandwidths FedScale publishes no distribution, but a trace.
    """
    return lambda generator: 1 / (0.005 * math.exp(1 + 0.6 * generator.standard_normal()))


@dataclass(frozen=True)
class Device:
    """A client's device: samples and bytes per second, and its working hours of each day, from hour
    `start` on.
    """

    speed: float
    down: float
    up: float
    start: float
    hours: float

    def finish(self, began: float, samples: float, bytes_down: float, bytes_up: float) -> float:
        """Return the second at which work that begins at second `began` is done:

            bytes_down / down + samples / speed + bytes_up / up

        seconds later, where the client always works; outside its hours it waits.
        """
        work = bytes_down / self.down + samples / self.speed + bytes_up / self.up
        if self.hours >= 24:
            return began + work
        length, opens = 3600 * self.hours, 3600 * self.start
        opened = began - (began - opens) % DAY  # when the last of its hours began
        done = min(began - opened, length)  # seconds of that day that have passed
        if done >= length:
            opened, done = opened + DAY, 0.0
        days = max(0, math.ceil((done + work) / length) - 1)
        return opened + days * DAY + done + work - days * length


@dataclass(frozen=True)
class Clock:
    """The table `[clock]`: how fast clients are, and how long the server waits for them.

    `speed` is the samples per second that a client trains on, `down` and `up` its bytes per second:
    a number for all, or `lognormal(median, sigma)`, `stragglers(fastest, times)` or `fedscale`
    (speed alone), drawn once for each client from the run's seed. What is left out takes no time.
    `hours` is how much of a day each client works, from an hour of its own on, drawn uniformly;
    outside it its work waits. `trace` is a CSV file with a line for each client, whose columns, of
    `speed`, `down`, `up`, `from` and `hours`, replace what is said here; with fewer lines than
    clients they are used in turn.

    A round takes as long as the slowest client whose reply is awaited. With a `deadline`, replies
    later than so many seconds after its beginning are dropped; with `over_selection` s, ceil((1 +
    s) K) clients are selected and the first K replies are taken. Asynchronous methods (`fedbuff`)
    use late replies as stale ones.
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
                "a clock needs the clients' speed, such as speed = 100 (samples per second), or a trace"
            )

    @property
    def lines(self) -> tuple[dict[str, float], ...]:
        """The entries of the trace, one for each client. Raises `InvalidValue` where it cannot be
        read.
        """
        return () if self.trace is None else _lines(self.trace)

    @property
    def runs(self) -> bool:
        """Return True if anything takes time."""
        return any(rate is not None for rate in (self.speed, self.down, self.up, self.trace))

    def device(self, seed: int, client: int) -> Device:
        """Return a client's device, the same in every round."""

        def drawn(name: str, rate: Any) -> float:
            if isinstance(rate, str):
                return float(_rate(rate)(numpy_stream(seed, f"clock {name}", client=client)))
            return math.inf if rate is None else float(rate)

        start = 24 * float(numpy_stream(seed, "clock hours", client=client).random())
        speed, down, up = (drawn(name, getattr(self, name)) for name in ("speed", "down", "up"))
        device = Device(speed, down, up, start, self.hours)
        return replace(device, **self.lines[client % len(self.lines)]) if self.lines else device

    def closes(self, now: float) -> float:
        """Return when the server stops waiting for the replies of a round that begins `now`."""
        return math.inf if self.deadline is None else now + self.deadline

    def selected(self, replies: int, clients: int) -> int:
        """Return how many clients to select for so many replies."""
        return min(clients, math.ceil((1 + self.over_selection) * replies - 1e-9))


@cache
def _rate(text: str) -> Rate:
    return cast(Rate, client_rates.build(parse(text)))


@cache
def _lines(path: str) -> tuple[dict[str, float], ...]:
    """The lines of a trace. Raises `InvalidValue` where it cannot be read, with the line."""
    try:
        rows = list(csv.DictReader(read_text(Path(path), "trace", SHARE_OF_TRACE).splitlines()))
    except (DataError, csv.Error) as error:
        raise InvalidValue(f"trace: {error}") from None
    if not rows:
        raise InvalidValue(
            f"trace: {path} holds no client: give a line of {', '.join(_TRACE)} and one for each client"
        )
    entries = []
    for number, row in enumerate(rows, start=2):
        for name, text in row.items():
            if name not in _TRACE:
                raise InvalidValue(
                    f"trace: {path} has a column {quoted(name)}: there are {', '.join(_TRACE)}"
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
