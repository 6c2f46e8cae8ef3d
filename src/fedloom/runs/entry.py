"""A method of a comparison with its own settings, which replace those of all methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, get_args

from fedloom.algorithm.method import Method
from fedloom.common.errors import InvalidValue, quoted
from fedloom.common.fields import checked, type_hints
from fedloom.common.training import Training
from fedloom.parts.building import build
from fedloom.rounds.schedule import NEUTRAL, Schedule
from fedloom.runs.settings import label, require_key
from fedloom.task import Task

Own = dict[str, Any]
"""Settings of one method: fields of the `Training` and of the `Schedule` with their values."""

_TRAINING = tuple(entry.name for entry in dataclasses.fields(Training))
_SCHEDULE = tuple(
    entry.name
    for entry in dataclasses.fields(Schedule)
    if entry.name not in ("seed", "clock", "stop", *NEUTRAL)
)

OWN_KEYS = (*_TRAINING, *_SCHEDULE)
"""The keys that a method may set for itself."""


class Entry:
    """A method with its own settings, for `fl.run` and `fl.compare`.

        fl.compare({"FedAvg": fl.Entry("fedavg", learning_rate=0.1), "FedMR": "fedmr"}, task)

    Attributes:
        algorithm: The method, without these settings.
        settings: The settings.
    """

    def __init__(self, algorithm: Method | str, **settings: Any) -> None:
        """Check the settings.

        Args:
            algorithm: The method, or its expression.
            **settings: Fields of the `Training`, such as `learning_rate=0.1`, and of the
                `Schedule`, such as `participation=0.5`. They replace those of the task and of the
                call.

        Raises:
            InvalidValue: A key or a value is not allowed.
        """
        self.algorithm = build(algorithm)
        self.settings = own_settings(settings)

    def __str__(self) -> str:
        return named(str(self.algorithm), self.settings)

    def __repr__(self) -> str:
        return f"Entry({self})"

    def task(self, task: Task) -> Task:
        """Return the task with the settings of local training."""
        training = training_part(self.settings)
        changed = dataclasses.replace(task.training, **training)
        return dataclasses.replace(task, training=changed) if training else task

    def schedule(self, schedule: Schedule, options: Mapping[str, Any]) -> Schedule:
        """Return the schedule with the settings of the schedule.

        Args:
            schedule: The schedule of the call.
            options: Its options. They must not contradict the settings.

        Returns:
            A new schedule.

        Raises:
            InvalidValue: An option contradicts a setting.
        """
        own = schedule_part(self.settings)
        for key in own.keys() & options.keys():
            if own[key] != options[key]:
                raise InvalidValue(
                    f"{key} = {quoted(options[key])} contradicts {key} = {quoted(own[key])} of "
                    f"{self!r}: leave it out, or run the method {str(self.algorithm)!r}"
                )
        return dataclasses.replace(schedule, **own)


class Chosen(Protocol):
    """The result of a search: its `method` has the chosen settings."""

    @property
    def method(self) -> Entry: ...


def entry_of(value: Method | str | Entry | Chosen) -> Entry:
    """Return a method as an entry. Raises as `build`."""
    if isinstance(value, Method | str):
        return Entry(value)
    if isinstance(value, Entry):
        return value
    chosen = None if isinstance(value, type) else getattr(value, "method", None)
    return chosen if isinstance(chosen, Entry) else Entry(value)  # type: ignore[arg-type]


def own_settings(values: Mapping[str, Any], prefix: str = "") -> Own:
    """Return the settings of a method with their types; the text none is None where it is allowed.

    Args:
        values: The settings by key.
        prefix: Precedes the keys in errors.

    Returns:
        The settings by key, without defaults of missing ones.

    Raises:
        InvalidValue: A key or a value is not allowed.
    """
    hints = {**type_hints(Schedule), **type_hints(Training)}
    settings = {}
    for key, value in values.items():
        require_key(key, OWN_KEYS, prefix)
        none = value == "none" and type(None) in get_args(hints[key])
        settings[key] = None if none else value
    training = checked(Training, training_part(settings), prefix)
    schedule = checked(Schedule, schedule_part(settings), prefix)
    return {key: training.get(key, schedule.get(key)) for key in settings}


def training_part(settings: Own) -> Own:
    """Return the settings that are fields of the `Training`."""
    return {key: value for key, value in settings.items() if key in _TRAINING}


def schedule_part(settings: Own) -> Own:
    """Return the settings that are fields of the `Schedule`."""
    return {key: value for key, value in settings.items() if key in _SCHEDULE}


def own_key(key: str) -> str:
    """Return a key of a configuration as a method sets it: `training.epochs` is `epochs`."""
    return key.removeprefix("training.").partition(".")[0]


def full_keys(settings: Own) -> dict[str, Any]:
    """Return the settings by their keys in a configuration, where none is text."""
    return {
        f"training.{key}" if key in _TRAINING else key: "none" if value is None else value
        for key, value in settings.items()
    }


def named(method: str, settings: Own) -> str:
    """Return the name of a method with its own settings: `fedavg, learning_rate=0.1`.

    Args:
        method: Label or expression of the method.
        settings: Its own settings by key.

    Returns:
        The name; without settings, `method` unchanged.
    """
    return ", ".join(filter(None, (method, label(settings))))
