"""Agreement between the server and the sites of a Flower app.

It covers the configuration, the shape of the data and the model's layout.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypedDict

from fedloom.common.digest import digest
from fedloom.common.errors import LONGEST_QUOTED, InvalidValue, one_line
from fedloom.common.fields import Count, NonNegative, NonNegativeInt, Share, checked, require_one_of
from fedloom.runs.config_file import configuration, load
from fedloom.runs.configuration import Configuration
from fedloom.survey.column_statistics import Survey, read_bounds
from fedloom.task import Task


class RunConfig(TypedDict, total=False):
    """Run configuration of a Flower app, `[tool.flwr.app.config]`.

    Flower sends it to the server and to every site. docs/real-sites.md describes the values.
    """

    configuration: str
    output: str
    deadline: NonNegative
    sites: NonNegativeInt
    wait: NonNegative
    largest_share: Share
    only: Literal["", "statistics"]
    smallest: Count
    bins: Count
    bounds: str
    epsilon: NonNegative
    delta: float


@dataclass(frozen=True)
class Deployment:
    """A federation over real sites, from the run configuration of its app.

    Attributes:
        text: The original configuration: TOML as for `fedloom run`, or the path of a file
            on the server and at every site.
        configuration: The configuration in `text`. `data.clients` is the number of sites,
            numbered from 0.
        output: Folder of the run on the server.
        sites: Number of sites that must be connected before round 1.
        deadline: Seconds that sites have for a round; 0 for no limit.
        wait: Seconds to wait for the sites.
        largest_share: Largest share of a round's mean for one site.
        only: "statistics" to collect statistics without training.
        survey: Settings of the statistics.
    """

    text: str
    configuration: Configuration
    output: Path
    sites: int
    deadline: float = 0
    wait: float = 600
    largest_share: float = 0.5
    only: str = ""
    survey: Survey = field(default_factory=Survey)

    @property
    def algorithm(self) -> str:
        return str(self.configuration.algorithm)

    @property
    def clients(self) -> int:
        return self.configuration.data.clients


def deployment(run_config: Mapping[str, Any]) -> Deployment:
    """Read and check the run configuration of a Flower app.

    Raises:
        InvalidValue: A value is missing, unknown or out of range; the text is one line.
    """
    for key in run_config:
        require_one_of("run configuration: key", key, tuple(RunConfig.__annotations__))
    for key in ("configuration", "output"):
        if not run_config.get(key):
            raise InvalidValue(f"run configuration: {key} is missing")
    values = checked(RunConfig, run_config, "run configuration: ")
    text = values.pop("configuration")
    output = Path(values.pop("output")).expanduser()
    federation = read_configuration(text)
    clients = federation.data.clients
    sites = values.pop("sites", 0) or clients
    if sites > clients:
        raise InvalidValue(
            f"run configuration: sites must be between 0 and {clients} (data.clients), not {sites}"
        )
    bounds = read_bounds(
        filter(str.strip, values.pop("bounds", "").split(";")), "run configuration: bounds"
    )
    options = {name: values.pop(name) for name in ("smallest", "bins", "delta") if name in values}
    survey = Survey(bounds=bounds, epsilon=values.pop("epsilon", 0) or None, **options)
    return Deployment(text, federation, output, sites, survey=survey, **values)


@lru_cache(maxsize=1)
def read_configuration(text: str) -> Configuration:
    """Return the configuration in a TOML text, or in the file at this path.

    Raises:
        InvalidValue: The text is not TOML, or does not describe exactly one federation.
    """
    if "=" in text or "\n" in text:
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            reason = one_line(str(error), LONGEST_QUOTED)
            raise InvalidValue(f"run configuration: configuration is not TOML: {reason}") from None
        settings = configuration({"name": "federation", **table})
    else:
        settings = load(Path(text))
    if settings.algorithm is None:
        raise InvalidValue(
            "run configuration: configuration has no algorithm: set algorithm, such as 'fedmr'"
        )
    if settings.variants:
        raise InvalidValue(
            "run configuration: configuration has several settings: a federation has only one"
        )
    if settings.data.clients < 1:
        raise InvalidValue(
            "run configuration: configuration must set data.clients, the number of sites"
        )
    return settings


def layout_digest(task: Task) -> str:
    """Return a digest of a model's layout.

    It covers the names, shapes, types and order of the tensors, and the values of frozen ones.
    """
    layout = task.layout
    slices = [
        (entry.name, tuple(entry.shape), str(entry.dtype))
        for entry in (*layout.slices, *layout.integer_slices)
    ]
    return digest(repr((layout.trainable, slices, layout.frozen_digest(task.model))))[:16]
