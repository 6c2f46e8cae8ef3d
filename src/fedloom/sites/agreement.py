"""Agreement between the server and the sites of a Flower app: the configuration, the shape of the data, the model's layout."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict

import torch

from fedloom.config.fields import NonNegative, NonNegativeInt, Share, checked, require_one_of
from fedloom.data.dataset import Dataset, Samples
from fedloom.errors import LONGEST_QUOTED, InvalidValue, RefusedReply, one_line
from fedloom.experiment.configuration import Configuration, configuration, load
from fedloom.objectives import Objective, objectives
from fedloom.objectives.custom import expression_of
from fedloom.sites.messages import Words
from fedloom.state.digest import digest
from fedloom.task import Task


class RunConfig(TypedDict, total=False):
    """Run configuration of a Flower app, `[tool.flwr.app.config]`, which goes to the server and to every site."""

    configuration: str
    output: str
    deadline: NonNegative
    sites: NonNegativeInt
    wait: NonNegative
    largest_share: Share


@dataclass(frozen=True)
class Deployment:
    """A federation over real sites, by the run configuration of its app, with `configuration` as it was written in `text`.

    That is a TOML file as `fedloom run` takes it, or the path of one that exists on the server and at every site; it must name an
    `algorithm`, and `data.clients` is the number of sites, numbered from 0. `output` is the folder on the server that becomes the
    run directory; starting a run again with the same folder goes on where that run was stopped.

    Sites have `deadline` seconds for one round, or as long as they need where that is 0. `sites` of them must be there before
    round 1 (all, where the run configuration says 0), and are waited for `wait` seconds. Where sites have data of their own, none
    counts for more than `largest_share` of a mean.
    """

    text: str
    configuration: Configuration
    output: Path
    sites: int
    deadline: float = 0
    wait: float = 600
    largest_share: float = 0.5

    @property
    def algorithm(self) -> str:
        """The method, as the configuration writes it."""
        return str(self.configuration.algorithm)

    @property
    def clients(self) -> int:
        """Number of sites."""
        return self.configuration.data.clients


def deployment(run_config: Mapping[str, Any]) -> Deployment:
    """Read and check the run configuration of a Flower app. Raises `InvalidValue` in one line for whatever does not fit."""
    for key in run_config:
        require_one_of("run configuration: key", key, tuple(RunConfig.__annotations__))
    for key in ("configuration", "output"):
        if not run_config.get(key):
            raise InvalidValue(f"run configuration: {key} is missing")
    values = checked(RunConfig, run_config, "run configuration: ")
    text, output = values.pop("configuration"), Path(values.pop("output")).expanduser()
    federation = read_configuration(text)
    clients = federation.data.clients
    sites = values.pop("sites", 0) or clients
    if sites > clients:
        raise InvalidValue(f"run configuration: sites must be between 0 and {clients} (data.clients), not {sites}")
    return Deployment(text, federation, output, sites, **values)


def read_configuration(text: str) -> Configuration:
    """Return the configuration in a text, or in the file that it names. Raises `InvalidValue` unless it is of one federation."""
    settings = load(Path(text)) if "=" not in text and "\n" not in text else _parsed(text)
    if settings.algorithm is None:
        raise InvalidValue("run configuration: configuration names no method: give algorithm, such as 'fedmr'")
    if settings.variants:
        raise InvalidValue("run configuration: configuration has several settings: a federation runs one")
    if settings.data.clients < 1:
        raise InvalidValue("run configuration: configuration must say how many sites there are: data.clients")
    return settings


@lru_cache(maxsize=1)
def _parsed(text: str) -> Configuration:
    """Parse a configuration; cached for sites that share a process, as in tests."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reason = one_line(str(error), LONGEST_QUOTED)
        raise InvalidValue(f"run configuration: configuration is not TOML: {reason}") from None
    return configuration({"name": "federation", **table})


def description(dataset: Dataset) -> Words:
    """Return the properties that the samples of every site must have, in plain values."""
    return {
        "name": dataset.name,
        "shape": list(dataset.spec.shape),
        "type": _type(dataset.train.inputs),
        "classes": dataset.classes,
        "objective": expression_of(dataset.objective),
        "mean": None if dataset.mean is None else list(dataset.mean),
        "std": None if dataset.std is None else list(dataset.std),
        "vocabulary": dataset.vocabulary,
        "class_names": None if dataset.class_names is None else list(dataset.class_names),
    }


def described(words: Any, train: Samples, source: str, objective: Objective | None = None) -> Dataset:
    """Return the data set of these samples, as the server describes it, with the objective of the configuration if it has one.

    Raises `RefusedReply` for a broken description, and `InvalidValue`, naming `source`, for samples that do not fit it.
    """
    try:
        shape, classes = tuple(int(size) for size in words["shape"]), int(words["classes"])
        mean, std = (None if words[key] is None else tuple(map(float, words[key])) for key in ("mean", "std"))
        vocabulary = None if words["vocabulary"] is None else int(words["vocabulary"])
        names = None if words["class_names"] is None else tuple(map(str, words["class_names"]))
        name, kind, objective_name = str(words["name"]), str(words["type"]), str(words["objective"])
    except (KeyError, TypeError, ValueError):
        raise RefusedReply("the server does not say what the data look like") from None
    try:  # the objective by its name alone: a server may not have sites import modules
        objective = objectives.build(objective_name) if objective is None else objective
        dataset = Dataset(name, train, train[:0], classes, mean, std, vocabulary, names, objective, standardise=False)
    except InvalidValue as error:
        raise InvalidValue(f"{source}: {error}") from None
    if tuple(train.inputs.shape[1:]) != shape or _type(train.inputs) != kind:
        raise InvalidValue(
            f"{source}: inputs are {list(train.inputs.shape[1:])} {_type(train.inputs)}, the federation's {list(shape)} {kind}"
        )
    if vocabulary is not None and len(train) and int(train.inputs.max()) >= vocabulary:
        raise InvalidValue(
            f"{source}: tokens must be 0 to {vocabulary - 1}, and {int(train.inputs.max())} is among them"
        )
    return dataset


def layout_digest(task: Task) -> str:
    """Return a digest of the names, shapes, types and order of a model's tensors, and of the numbers of frozen ones."""
    layout = task.layout
    slices = [(entry.name, tuple(entry.shape), str(entry.dtype)) for entry in (*layout.slices, *layout.integer_slices)]
    return digest(repr((layout.trainable, slices, task.frozen_digest)))[:16]


def _type(inputs: torch.Tensor) -> str:
    return str(inputs.dtype).removeprefix("torch.")
