"""Families of methods, for the lists of the command line and the pages of the documentation."""

import inspect

from fedloom.algorithm import Algorithm, personalises
from fedloom.algorithms.fedmr import Indep
from fedloom.algorithms.fedmut import FedMut
from fedloom.config.registry import Entry

FAMILIES = {
    "recombination": "Recombination",
    "global": "One global model",
    "personal": "A model for each client",
    "composing": "Around other methods",
}
"""Title of each family, by name."""


def family_of(entry: Entry[type[Algorithm]]) -> str:
    """Return the name of a method's family; `composing` is for methods that need an inner method."""
    make, parameters = entry.make, entry.parameters
    if any(name in parameters and parameters[name].default is inspect.Parameter.empty for name in make.wraps):
        return "composing"
    if personalises(make):
        return "personal"
    return "recombination" if issubclass(make, Indep | FedMut) else "global"
