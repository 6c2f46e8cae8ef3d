"""fedloom: federated learning on clients whose data differ.

    import fedloom as fl

    task = fl.make_task("digits", clients=20, partition="dirichlet(0.1)", model="digits_cnn")
    result = fl.run(fl.FedMR(), task, rounds=50, participation=0.5, seed=0)
    result.accuracy, result.model

Every registered method is here under its class name. Nothing is loaded before it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedloom.algorithm import Algorithm, build
    from fedloom.data import Dataset, DataSpec, Partition, Samples
    from fedloom.errors import FedloomError
    from fedloom.experiment.artifact import load_model
    from fedloom.experiment.run import Result, run
    from fedloom.rounds.federation import Federation
    from fedloom.rounds.schedule import Schedule
    from fedloom.task import Task, make_task
    from fedloom.training import Training

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "DataSpec",
    "Dataset",
    "Federation",
    "FedloomError",
    "Partition",
    "Result",
    "Samples",
    "Schedule",
    "Task",
    "Training",
    "build",
    "load_model",
    "make_task",
    "run",
]

_HOMES = {
    "Algorithm": "fedloom.algorithm",
    "build": "fedloom.algorithm",
    "DataSpec": "fedloom.data",
    "Dataset": "fedloom.data",
    "Partition": "fedloom.data",
    "Samples": "fedloom.data",
    "FedloomError": "fedloom.errors",
    "load_model": "fedloom.experiment.artifact",
    "Result": "fedloom.experiment.run",
    "run": "fedloom.experiment.run",
    "Federation": "fedloom.rounds.federation",
    "Schedule": "fedloom.rounds.schedule",
    "Task": "fedloom.task",
    "make_task": "fedloom.task",
    "Training": "fedloom.training",
}


def _methods() -> dict[str, Any]:
    from fedloom.algorithm import algorithms

    return {entry.make.__name__: entry.make for entry in algorithms}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name.startswith("_") or name not in (methods := _methods()):
        raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
    else:
        found = methods[name]
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_methods()})
