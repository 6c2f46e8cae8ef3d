"""Statistics of the clients' columns before training: computed where the data are, and only summed
at the server.

The server asks every client four times, and adds up the numbers that come back:

    kinds      the columns, each of `numbers` or of `categories`
    sums       rows, empty cells, and the sum of the numbers or the rows of each category
    squares    squared deviations from the mean over all clients; without bounds, also the means of
               the `smallest` lowest and of the `smallest` highest numbers, between which bins lie
    bins       rows in each of equal bins; the outer two are open

A client leaves out what fewer than `smallest` of its rows say: a column, a category; bins share
rows with their neighbours. With noise a client answers for every column: a missing answer would
tell how many rows it has. Its own `smallest` is the least for each request, whatever the server
sends.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from scipy.stats import norm
from torch import Tensor
from typing_extensions import TypedDict

from fedloom.common.errors import (
    InvalidValue,
    RefusedReply,
    one_line,
    quoted,
    shortened,
    suggestion,
)
from fedloom.common.fields import Count, Finite, NonNegative
from fedloom.common.randomness import stream
from fedloom.data.columns import TableInputs
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.lazy import in_memory
from fedloom.parts.accounting import noise_for
from fedloom.parts.gaussian_noise import normal
from fedloom.survey.column_statistics import (
    MOST_BINS,
    REACH,
    ColumnStatistics,
    Kind,
    Statistics,
    Survey,
)
from fedloom.task import Task

_logger = logging.getLogger("flwr.fedloom")

Words = dict[str, Any]
Values = np.ndarray[Any, Any]
"""A column: float64 `[n]` or `[n, m]`, NaN where a cell is empty; or text `[n]`, None where it is
empty.
"""

OTHER = "(other)"
"""Name of the categories that too few training rows have."""

MOST_ROWS = 2.0**48
"""Rows that a client can have, at most; with noise a few more or fewer than none."""

MOST_CATEGORIES, MOST_OWN = 10_000, 100
"""Categories of a column that one client may tell, and of those that no other one tells, at
most.
"""


def _writable(name: str) -> str:
    """Return a name that files can hold; raises `ValueError` for others."""
    name.encode()
    return name


_Name = Annotated[str, Field(max_length=1000), AfterValidator(_writable)]
_Rows = Annotated[float, Field(ge=-MOST_ROWS, le=MOST_ROWS)]

Listed = tuple[list[Finite], Annotated[dict[_Name, _Rows], Field(max_length=MOST_CATEGORIES)]]
"""Answer about one column: numbers, and the rows of each category."""

LEAST_NOISE = 1.0
"""Deviation of the noise, in rows, from which on it takes the place of a client's `smallest`."""

MOST_DELTA = 1e-5
"""Probability with which a client tells a category of a single row beside noise, at most."""

LEAST_RANGE = 1e-6
"""Range of a column that is no constant, in units of the reach of its bins."""

_Number = Annotated[float, Field(allow_inf_nan=False)]


class _About(TypedDict):
    """What a request asks about one column."""

    bounds: NotRequired[tuple[_Number, _Number]]
    mean: NotRequired[_Number]
    least: NotRequired[_Number]
    bins: NotRequired[tuple[_Number, _Number, Annotated[int, Field(ge=1, le=MOST_BINS)]]]


class _Request(TypedDict):
    """Request of the server, as a client accepts it."""

    step: Literal["kinds", "sums", "squares", "bins"]
    smallest: Count
    noise: NonNegative
    columns: NotRequired[dict[str, _About]]


def statistics(task: Task, *, seed: int | None = 0, **settings: Any) -> Statistics:
    """Return statistics of the clients' training samples, by column, as a federation over sites
    computes them.

    Args:
        task: Data and clients.
        seed: Seed of the noise; None draws from the system's cryptographic generator.
        settings: Fields of `Survey`: `smallest`, `bins`, `bounds`, `epsilon`, `delta`.

    Returns:
        The statistics; `frame()` is a table of pandas, `plot()` a figure, `save("statistics.html")`
        writes a page.

    Raises:
        InvalidValue: A setting is out of range.
    """
    clients = [client_columns(task, client) for client in range(task.clients)]
    return collect(
        lambda request: {n: answer(c, request, 1, seed, n) for n, c in enumerate(clients)},
        Survey(**settings),
    )


# --- a client ---


def client_columns(task: Task, client: int) -> dict[str, Values]:
    """Return a client's training samples as columns.

    Args:
        task: The task.
        client: Number of the client.

    Returns:
        The columns by name, as in `columns_of`, in the units before standardisation.
    """
    rows = task.dataset.train  # before standardisation
    if len(task.train) != len(rows):  # merged
        rows = rows.concatenate(task.dataset.test)
    return columns_of(task.dataset, rows[torch.from_numpy(task.partition[client])])


def columns_of(dataset: Dataset, samples: Samples) -> dict[str, Values]:
    """Return samples as columns: a table's in their units, features, pixels by channel or numbers
    of tokens; then the target.

    Args:
        dataset: The data set of the samples, with the encoding and the names of classes.
        samples: n samples, with inputs `[n, ...]`.

    Returns:
        The columns by name, the target last. Numbers are float64, `[n]` or `[n, values]`; pixels
        are shares of 255. Categories are texts `[n]`, None for an empty cell.
    """
    inputs, labels = in_memory(samples.inputs).cpu(), samples.labels.cpu()
    columns: dict[str, Tensor | Values] = {}
    if isinstance(dataset.encoding, TableInputs):
        encoded = dataset.encoding.columns
        blocks = inputs.split([column.features for column in encoded], 1)
        for column, block in zip(encoded, blocks, strict=True):
            columns[column.name] = block.squeeze(1)
            if column.categories is not None:
                # the category "" stands for empty cells
                others = [OTHER] * column.other
                texts = np.array(
                    [*(name or None for name in column.categories), *others, None], object
                )
                index = torch.where(block.any(1), block.argmax(1), len(texts) - 1)
                columns[column.name] = texts[index.numpy()]
    elif inputs.dtype == torch.uint8:
        channels = inputs.double().unbind(1)
        columns = {f"channel {k}": values.flatten(1) / 255 for k, values in enumerate(channels)}
    elif not inputs.is_floating_point():
        columns = {"tokens": (inputs != 0).sum(1)}
    elif inputs.dim() == 2:
        columns = {f"feature {k}": feature for k, feature in enumerate(inputs.unbind(1))}
    else:
        columns = {"inputs": inputs.flatten(1)}
    names = np.array(dataset.class_names or [*map(str, range(dataset.classes))], object)
    one_class = dataset.objective.classes and labels.dim() == 1
    columns[dataset.target or "target"] = names[labels.numpy()] if one_class else labels
    return {
        name: values.double().numpy() if isinstance(values, Tensor) else values
        for name, values in columns.items()
    }


def answer(
    columns: Mapping[str, Values],
    request: Words,
    smallest: int = 1,
    seed: int | None = None,
    client: int = 0,
) -> Words:
    """Return a client's answer to a request of the server, as plain values.

    Without noise, no number tells of fewer rows than `smallest`, the client's own. With noise the
    client answers for every column, also for one without rows.

    Args:
        columns: Columns of the client by name.
        request: Request, which is checked: a server is not trusted.
        smallest: Fewest rows that a number may tell of at this client.
        seed: Seed of the noise, as in `statistics`.
        client: Number of the client, for the stream of the noise.

    Returns:
        The answer.

    Raises:
        RefusedReply: The request is not one of `collect`.
        InvalidValue: The noise does not hide a row, or a column has several numbers a row.
    """
    asked = _checked_request(columns, request, smallest)
    step, noise = asked["step"], asked["noise"]
    if step == "kinds":
        return {"kinds": {name: _kind(values) for name, values in columns.items()}}

    def random(purpose: str, count: int = 1) -> Values:
        generator = (
            None if seed is None else stream(seed, f"statistics {step} {purpose}", client=client)
        )
        return noise * normal(torch.empty(count), generator).numpy() if noise else np.zeros(count)

    least = 0 if noise else max(smallest, asked["smallest"])
    hiding = float(max(least, smallest))
    if noise:  # the client computes itself what hides a single row
        texts = sum(_kind(values) == "categories" for values in columns.values())
        hiding = max(hiding, _hiding_rows(noise, MOST_DELTA, texts))
    answers: dict[str, Listed] = {}
    for name, about in asked.get("columns", {}).items():
        values = _complete(columns[name], about)
        if not noise and _told(columns[name], values, about) < least:
            empty = len(columns[name])
            if step == "sums" and not len(values) and empty >= least:
                zeros = 3 if _kind(values) == "numbers" else 2
                answers[name] = [0.0, float(empty), 0.0][:zeros], {}
            continue
        if step == "sums":
            empty = len(columns[name]) - len(values)
            empty = 0 if noise or empty < least else empty
            shown = max(hiding, about.get("least", 0.0))  # a server may only raise it
            answers[name] = _sums(values, about, empty, shown, partial(random, name), noise > 0)
        elif step == "squares":
            answers[name] = _squares(values, about, least, random(name)[0]), {}
        else:
            low, high, count = about["bins"]
            rows = np.histogram(np.clip(values, low, high), count, (low, high))[0].astype(float)
            shared = rows if noise else shared_rows(rows, least)
            answers[name] = (shared + random(name, count)).tolist(), {}
    return {"columns": answers}


def _checked_request(columns: Mapping[str, Values], request: Words, smallest: int) -> _Request:
    """Return the request with values of their types.

    Raises `RefusedReply` for a request that no server of fedloom sends, `InvalidValue` for one
    whose settings do not fit this client's.
    """
    try:
        asked = TypeAdapter(_Request).validate_python(request)
    except ValidationError as error:
        places = ".".join(map(str, error.errors()[0]["loc"]))
        raise RefusedReply(f"the server's request has a bad {one_line(places, 80)}") from None
    noise = asked["noise"]
    if smallest > 1 and 0 < noise < LEAST_NOISE:
        remedy = "choose a smaller epsilon"
        raise InvalidValue(
            f"noise of {noise:.2g} rows must be at least {LEAST_NOISE:g} at this client: {remedy}"
        )
    needed = {"kinds": (), "sums": (), "squares": ("mean",), "bins": ("bins",)}[asked["step"]]
    for name, about in asked.get("columns", {}).items():
        if name not in columns:
            raise RefusedReply(f"the server requests column {quoted(name)}, which this site lacks")
        numbers = _kind(columns[name]) == "numbers"
        if noise and columns[name].ndim > 1:
            raise InvalidValue(
                f"epsilon: column {quoted(name)} has several numbers a row, and noise is for one"
            )
        wanted = (*needed, *(("bounds",) if noise and numbers else ()))
        missing = [key for key in wanted if key not in about]
        ranges = [about[key][:2] for key in ("bounds", "bins") if key in about]
        if missing or (needed and not numbers) or any(low >= high for low, high in ranges):
            raise RefusedReply(f"the server's request about column {quoted(name)} is broken")
    return asked


def _told(cells: Values, values: Values, about: _About) -> int:
    """Return of how many rows the numbers of a column tell: those within the bounds.

    Clipped rows are all alike, so that narrow bounds would tell of the few between them.
    """
    if "bounds" not in about or cells.ndim > 1:
        return len(values)
    low, high = about["bounds"]
    return int(((low <= cells) & (cells <= high)).sum())


def _hiding_rows(noise: float, delta: float, texts: int) -> float:
    """Return the fewest noisy rows of a category that may be told, of `texts` columns of text.

    A category of a single row is told with probability delta / 2, over all columns.
    """
    return 1 + noise * float(norm.isf(delta / 2 / max(1, texts)))


def _sums(
    values: Values,
    about: _About,
    empty: int,
    least: float,
    random: Callable[[int], Values],
    noisy: bool,
) -> Listed:
    if _kind(values) == "categories":
        texts, counts = np.unique(values.astype(str), return_counts=True)
        counts = counts + random(len(texts))
        rows = {str(text): float(n) for text, n in zip(texts, counts, strict=True) if n >= least}
        return [sum(rows.values()) if noisy else len(values), empty], rows
    low, high = about.get("bounds", (0.0, 0.0))
    count, total = random(2) * (1.0, (high - low) / 2) + (
        values.size,
        (values - (low + high) / 2).sum(),
    )
    return [float(count), empty, float(total + count * (low + high) / 2)], {}


def _squares(values: Values, about: _About, least: int, noise: float) -> list[float]:
    """Return the squared deviations and, without bounds, means of the `least` lowest and highest
    numbers, each of which tells of `least` rows.
    """
    mean, bounds = about["mean"], about.get("bounds", ())
    most = max(((bound - mean) ** 2 for bound in bounds), default=0.0)
    squares = float(((values - mean) ** 2).sum() + most * noise)
    if bounds or not len(values):
        return [squares]
    count = max(1, least) * (values.size // len(values))
    ordered = np.sort(values, axis=None)
    return [squares, float(ordered[:count].mean()), float(ordered[-count:].mean())]


def shared_rows(rows: Values, smallest: int) -> Values:
    """Return rows `[bins]` of which every stretch that holds any holds `smallest` or more, shared
    evenly by its bins.

    Args:
        rows: Rows of the client in each bin, `[bins]`.
        smallest: Fewest rows that a stretch of neighbouring bins may hold.

    Returns:
        Rows of each bin, `[bins]`: the mean over its stretch. Their sum is unchanged, or 0 if all
        bins together hold fewer than `smallest` rows.
    """
    stretches: list[list[int]] = []
    total, filled = smallest, np.flatnonzero(rows).tolist()
    for k in filled:
        if total >= smallest:  # else the stretch continues
            stretches, total = [*stretches, [k, k]], 0
        stretches[-1][1] = k + 1
        total += rows[k]
    if total < smallest:  # the rest joins its neighbours
        *stretches, (_, end) = stretches
        stretches = [*stretches[:-1], [stretches[-1][0], end]] if stretches else []
    shared = np.zeros(len(rows))
    for begin, end in stretches:
        shared[begin:end] = rows[begin:end].mean()
    return shared


def _kind(values: Values) -> Kind:
    return "numbers" if values.dtype.kind == "f" else "categories"


def _complete(values: Values, about: _About) -> Values:
    if _kind(values) == "categories":
        complete: Values = values[np.array([cell is not None for cell in values], bool)]
        return complete
    complete = values[~np.isnan(values)] if values.ndim == 1 else values
    return complete.clip(*about["bounds"]) if "bounds" in about else complete


# --- the server ---


def collect(ask: Callable[[Words], Mapping[int, Words]], survey: Survey) -> Statistics:
    """Return the statistics of all clients.

    Args:
        ask: Sends a request to every client and returns their answers by the client's number. A
            client without an answer counts only in the steps that it answered.
        survey: Settings.

    Returns:
        The statistics.

    Raises:
        InvalidValue: Columns differ between clients, or bounds are missing or of no column.
        RefusedReply: An answer does not hold the numbers that were asked for.
    """
    replies = ask({"step": "kinds", "smallest": survey.smallest, "noise": 0.0})
    tables = {
        client: _sound(dict[_Name, Kind], words.get("kinds"), client)
        for client, words in replies.items()
    }
    collection = _Collection(ask, survey, _agreed(tables))
    collection.add_sums()
    collection.add_squares()
    collection.add_bins()
    return Statistics(
        collection.columns, len(tables), survey, collection.noise, collection.releases
    )


class _Collection:
    """The statistics as they grow from step to step."""

    def __init__(
        self, ask: Callable[[Words], Mapping[int, Words]], survey: Survey, kinds: Mapping[str, Kind]
    ) -> None:
        self.ask, self.survey = ask, survey
        self.columns = {name: ColumnStatistics(kind) for name, kind in kinds.items()}
        self.numbers = [name for name, kind in kinds.items() if kind == "numbers"]
        bounds, numbers = survey.bounds, self.numbers
        for name in bounds:
            if name not in numbers:
                near = suggestion(name, numbers)
                raise InvalidValue(f"bounds: {quoted(name)} is no column of numbers{near}")
        self.noise, self.releases = 0.0, 0
        # rows of each column at each client; a client may be lost between two steps
        self.counts: dict[str, dict[int, float]] = {name: {} for name in kinds}
        self.told: dict[str, dict[int, dict[str, float]]] = {}
        self.about: dict[str, Words] = {
            name: {"bounds": bounds[name]} if name in bounds else {} for name in kinds
        }
        if survey.epsilon is not None:
            for name in numbers:
                if name not in bounds:
                    raise InvalidValue(
                        f"epsilon needs bounds for column {quoted(name)}: the lowest and highest "
                        "value it can have"
                    )
            texts = len(kinds) - len(numbers)
            self.releases = 4 * len(numbers) + texts
            self.noise = noise_for(survey.epsilon, 1.0, self.releases, survey.delta / 2)
            least = _hiding_rows(self.noise, survey.delta, texts)
            self.about |= {name: {"least": least} for name in kinds if name not in numbers}

    def add_sums(self) -> None:
        """Add the rows, the empty cells, the means and the categories of all columns."""
        for name, ((count, empty, *total), rows) in self._summed("sums", 2).items():
            categories = dict(sorted(rows.items()))
            self._set(name, count=count, empty=empty, categories=categories)
            if total and count > 0:
                low, high = self.survey.bounds.get(name, (-math.inf, math.inf))
                self.about[name]["mean"] = min(max(total[0] / count, low), high)
        self.about = {name: words for name, words in self.about.items() if "mean" in words}

    def add_squares(self) -> None:
        """Add the deviations, and the edges of the bins."""
        for name, ((squares, *extremes), _) in self._summed("squares", 1).items():
            mean = self.about[name]["mean"]
            count = sum(self.counts[name][client] for client in self.told[name])
            deviation = math.sqrt(max(0.0, squares) / count) if count > 0 else 0.0
            edges = self.survey.bounds.get(name) or _edges(mean, deviation, extremes)
            self._set(name, mean=mean, deviation=deviation, edges=edges)
            self.about[name]["bins"] = (*edges, self.survey.bins)

    def add_bins(self) -> None:
        """Add the rows of each bin."""
        for name, (bins, _) in self._summed("bins", self.survey.bins).items():
            self._set(name, bins=tuple(bins))

    def _set(self, name: str, **figures: Any) -> None:
        self.columns[name] = replace(self.columns[name], **figures)

    def _summed(self, step: str, length: int) -> dict[str, Listed]:
        """Return the sums over the clients of `length` numbers of each column (one more for sums of
        numbers), the lowest and highest numbers, and the rows of each category.
        """
        request = {"step": step, "smallest": self.survey.smallest, "noise": self.noise}
        if self.noise:
            request["releases"] = self.releases
        answers = self.ask({**request, "columns": self.about}) if self.about else {}
        sums: dict[str, list[float]] = {}
        self.told = told = dict[str, dict[int, dict[str, float]]]()
        for client, words in sorted(answers.items()):
            columns = _sound(dict[_Name, Listed], words.get("columns"), client)
            for name, (listed, rows) in columns.items():
                wanted = length + (step == "sums" and name in self.numbers)
                wanted += 2 * (step == "squares" and name not in self.survey.bounds)
                if name not in self.about or len(listed) != wanted:
                    raise _refusal(client)
                positive = listed[:1] if step == "squares" else listed[:2]
                if not self.noise and min(*positive, *rows.values(), 0.0) < 0:
                    raise _refusal(client)
                if step == "sums":
                    self.counts[name][client] = listed[0]
                sums[name] = _merged(step, sums[name], listed) if name in sums else listed
                told.setdefault(name, {})[client] = rows
        return {name: (total, _categories(told[name], name)) for name, total in sums.items()}


def _merged(step: str, total: Sequence[float], listed: Sequence[float]) -> list[float]:
    """Return the sums of two answers; of the lowest and the highest numbers the extremes."""
    sums = list(map(add, total, listed))
    if step != "squares":
        return sums
    return [sums[0], *map(min, total[1:2], listed[1:2]), *map(max, total[2:], listed[2:])]


def _edges(mean: float, deviation: float, extremes: Sequence[float]) -> tuple[float, float]:
    """Return where bins begin and end: `REACH` deviations from the mean, not beyond the lowest and
    the highest numbers.
    """
    reach = REACH * deviation or max(1.0, abs(mean)) / 2
    low, high = max(mean - reach, extremes[0]), min(mean + reach, extremes[1])
    if high - low < reach * LEAST_RANGE:  # a constant
        return mean - reach, mean + reach
    return low, high


def _categories(told: Mapping[int, Mapping[str, float]], name: str) -> dict[str, float]:
    """Return the rows of each category over all clients.

    Each category widens everybody's model, so that a client adds at most `MOST_OWN`, its most
    frequent ones, beside those that another client tells, too.
    """
    clients = Counter(text for rows in told.values() for text in rows)
    counts: Counter[str] = Counter()
    for client, rows in told.items():
        own = sorted((text for text in rows if clients[text] == 1), key=lambda t: (-rows[t], t))
        if len(own) > MOST_OWN:
            text = "has %d categories of its own in column %s: those with the most rows count, %d"
            _logger.warning(f"client %d {text}", client, len(own), quoted(name), MOST_OWN)
        left_out = set(own[MOST_OWN:])
        counts.update({text: n for text, n in rows.items() if text not in left_out})
    return dict(counts)


def _agreed(kinds: Mapping[int, Mapping[str, Kind]]) -> dict[str, Kind]:
    differences = []
    for name in dict.fromkeys(name for table in kinds.values() for name in table):
        clients: dict[str, list[str]] = {}
        for client, table in sorted(kinds.items()):
            clients.setdefault(table.get(name, "missing"), []).append(str(client))
        if len(clients) > 1:
            texts = [f"{kind} at {', '.join(listed)}" for kind, listed in clients.items()]
            differences.append(f"{quoted(name)} is {' and '.join(texts)}")
    if differences:
        raise InvalidValue(
            f"columns differ from client to client: {shortened('; '.join(differences))}"
        )
    return dict(kinds[min(kinds)])


def _sound(expected: Any, value: Any, client: int) -> Any:
    try:
        return TypeAdapter(expected).validate_python(value)
    except ValidationError:
        raise _refusal(client) from None


def _refusal(client: int) -> RefusedReply:
    return RefusedReply(f"client {client} does not answer with numbers of the columns")
