"""Families of methods, for the lists of the command line and the pages of the documentation."""

import inspect
from typing import Any

from fedloom.algorithm import DEPLOYMENT, Algorithm, overrides
from fedloom.algorithm.method import Method
from fedloom.algorithms.fedmr import Indep
from fedloom.algorithms.fedmut import FedMut
from fedloom.common.registry import RegistryEntry
from fedloom.parts.fedmr_async import FedMRAsync
from fedloom.parts.hooks import Part

FAMILIES = {
    "recombination": "Recombination",
    "global": "One global model",
    "personal": "A model for each client",
    "composing": "Around other methods",
}
"""Title of each family, by name."""


def family_of(entry: RegistryEntry[type[Method]]) -> str:
    """Return the name of a method's family. Parts that need an inner method are in `composing`."""
    make: Any = entry.make
    for name in {"method", "stages"} & entry.parameters.keys():
        if entry.parameters[name].default is inspect.Parameter.empty:
            return "composing"
    if issubclass(make, Indep | FedMut | FedMRAsync):
        return "recombination"
    base, hooks = (Part, ("personalise",)) if issubclass(make, Part) else (Algorithm, DEPLOYMENT)
    return "personal" if overrides(make, base, hooks) else "global"
