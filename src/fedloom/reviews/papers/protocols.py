"""Settings, measures and cells of the papers' tables and figures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fedloom.common.expression import parse


@dataclass(frozen=True)
class Setting:
    """A paper's experiment but for the method and the seed.

    `data` is the data set's expression without a folder, `training` the keys of `[training]` that
    are not the defaults. Evaluations take place every `evaluate_every` rounds, of the global model
    or, with `personal`, of the clients' own models on the quarter of each client's data that is
    held out (FedALA; training and test part are merged before). `seeds` are the runs of the
    protocol. `only` names the method that this setting is for, where a paper trains one method in
    another way than the others in the same column.
    """

    paper: str
    name: str
    data: str = ""
    clients: int = 0
    partition: str = ""
    model: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    participation: float = 1.0
    evaluate_every: int = 1
    personal: bool = False
    seeds: Sequence[int] = (0,)
    record: Sequence[str] = ()
    only: str = ""

    @property
    def key(self) -> str:
        """The name that differs between the settings of one table: with the method that has a
        setting for itself.
        """
        return f"{self.name} ({self.only})" if self.only else self.name

    def table(self, rounds: int) -> dict[str, Any]:
        """Return the configuration of this setting without methods, seeds and folders.

        Few rounds have ten evaluations and recordings, or one a round.
        """
        tenth = max(1, rounds // 10)
        every = min(self.evaluate_every, tenth)
        data: dict[str, Any] = {
            "name": self.data,
            "clients": self.clients,
            "partition": self.partition,
        }
        if self.personal:
            data |= {"local_test": 0.25, "merge": True}
        return {
            "rounds": rounds,
            "participation": self.participation,
            # The paper has no figure of the global model of a personal run: score it only at
            # the end.
            "evaluate_every": rounds if self.personal else every,
            **({"personal_every": every} if self.personal else {}),
            "model": self.model,
            "record": [
                re.sub(r"(?<=every=)\d+", lambda n: str(min(int(n[0]), tenth)), text)
                for text in self.record
            ],
            "data": data,
            "training": dict(self.training),
        }


@dataclass(frozen=True)
class Measure:
    """The figure of a cell.

    `best`      best test accuracy over rounds, %
    `end`       mean of the last ten evaluations' test accuracy, %
    `personal`  best over rounds of the accuracy of the clients' own models, over all their test
                samples, %
    `joining`   the same over only the clients that take part in the round, %
    `improvement`  best personal accuracy less the baseline's, points
    `rounds`    first round whose test accuracy is at least `target` %; `interpolated`: where the
                best accuracy so far, drawn with straight lines between rounds, crosses it (McMahan
                et al. 2017)
    `speedup`   the baseline's round over this run's
    `minutes`   minutes a round (training and server)
    `total`     minutes until the best personal accuracy is reached
    `slower`    minutes a round over the baseline's
    `models`    models sent and received a round (`a_client`: by one client), from counted bytes
    `weights`   weights that ALA learns, from the model
    `classes`   classes that a client holds, mean over the clients
    """

    kind: str
    target: float | None = None
    a_client: bool = False
    interpolated: bool = False

    @property
    def unit(self) -> str:
        """The unit of its figures."""
        return _UNITS.get(self.kind, self.kind)


_UNITS = {
    **dict.fromkeys(("best", "end", "personal", "joining"), "%"),
    **dict.fromkeys(("speedup", "slower"), "x FedAvg"),
    **{"improvement": "points", "minutes": "min a round", "total": "min"},
}
"""Units of the kinds that do not name one."""


@dataclass(frozen=True)
class Printed:
    """A printed figure: `mean` is None where a target was never reached (`*`), `std` where it gives
    none.
    """

    mean: float | None
    std: float | None = None


@dataclass(frozen=True)
class PaperRun:
    """A method as the paper calls it (`row`), its setting and its expression."""

    row: str
    setting: Setting
    algorithm: str

    @property
    def key(self) -> tuple[str, str]:
        """The names of setting and method in the runs of one table."""
        return self.setting.key, str(parse(self.algorithm))


@dataclass(frozen=True)
class PaperCell(PaperRun):
    """One value of a table or figure: `column` is the setting with the target, if any; `printed` is
    None for a curve, of which the paper prints no number. `baseline` is the run that is compared
    with, where the measure compares two.
    """

    column: str
    measure: Measure
    printed: Printed | None = None
    baseline: PaperRun | None = None


@dataclass(frozen=True)
class Exhibit:
    """A table or figure; `shows` is a short description, `cells` are in the paper's order."""

    id: str
    shows: str
    cells: list[PaperCell]
