"""Check the names in a configuration before any work begins."""

from collections.abc import Callable
from typing import TypeVar

from fedloom.common.errors import FedloomError, InvalidValue, quoted
from fedloom.common.plugins import import_plugins
from fedloom.data.dataset import datasets
from fedloom.data.noise import label_noises
from fedloom.data.partition import partitions
from fedloom.data.shift import shifts
from fedloom.engines.choose import require_engine_on
from fedloom.models import models
from fedloom.objectives.custom import build_objective
from fedloom.report.summary import TO_TARGET
from fedloom.runs.configuration import Configuration
from fedloom.runs.entry import named
from fedloom.runs.trackers.tracker import build_tracker

_Value = TypeVar("_Value")


_Made = TypeVar("_Made")


def require_known(checked: Configuration) -> None:
    """Look up every engine, method, recorder, data set, partition and model before the first round
    of any run.

    Raises:
        UnknownName: A name is not registered.
        InvalidValue: A name is listed twice, or an expression is not valid.
    """
    import_plugins(checked.plugins)
    require_engine_on(checked.engine, checked.device)
    if checked.algorithm is not None:
        _named("algorithm", checked.algorithm, checked.method)
    described = [
        named(str(_named("algorithms", text, checked.method)), checked.own.get(text, {}))
        for text in checked.algorithms
    ]
    for position, method in enumerate(described):
        if method in described[:position]:
            raise InvalidValue(f"algorithms lists {quoted(method)} twice")
    for recorder in _named("record", checked.record, lambda record: checked.recorders()):
        reasons = [recorder.inapplicable(checked.method(text)) for text in checked.methods]
        if reasons and all(reasons):
            listed = ", ".join(checked.methods)
            raise InvalidValue(
                f"record: {recorder.name}: nothing to record for {listed}: {reasons[0]}"
            )
    for text in checked.trackers:
        _named("trackers", text, build_tracker)
    if checked.measure in TO_TARGET and not checked.targets:
        raise InvalidValue(
            f"measure = {checked.measure!r} needs a target to reach: give targets = [0.9]"
        )
    data = checked.data
    _named("data.name", data.name, datasets.read)
    if not _is_own(data.partition):
        _named("data.partition", data.partition, partitions.read)
    _named("data.label_noise", data.label_noise, label_noises.build_unless_none)
    _named("data.shift", data.shift, shifts.build_unless_none)
    if checked.objective is not None:
        _named("objective", checked.objective, build_objective)
    if not _is_own(checked.model):
        _named("model", checked.model, models.read)


def _is_own(expression: str) -> bool:
    """Return True for a `module:name`. It is imported only when it is used."""
    return ":" in expression.partition("(")[0]


def _named(key: str, value: _Value, make: Callable[[_Value], _Made]) -> _Made:
    """Return `make(value)`; the text of its errors begins with the key and the value."""
    try:
        return make(value)
    except FedloomError as error:
        raise InvalidValue(f"{key} = {quoted(value)}: {error}") from None
