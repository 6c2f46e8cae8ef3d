"""The moments of a round, for the command line and the documentation."""

from typing import NamedTuple

from fedloom.algorithm.method import algorithms
from fedloom.parts.hooks import HOOKS, Part, hooks_of


class Moment(NamedTuple):
    """A moment of a round: its name, its hooks, and the machines on which they run."""

    name: str
    hooks: tuple[str, ...]
    runs: str


MOMENTS = (
    Moment("before the selection", ("poll",), "server and clients"),
    Moment("selection", ("select",), "server"),
    Moment("message", ("message",), "server"),
    Moment("exchange before training", ("move",), "clients"),
    Moment("download", ("encode_down", "decode_down"), "server and clients"),
    Moment("local training", ("train",), "clients"),
    Moment("attack", ("corrupt",), "clients, simulation only"),
    Moment("upload", ("encode", "expects", "coded", "decode"), "clients and server"),
    Moment("exchange before the upload", ("exchange",), "clients"),
    Moment("end of a step", ("close",), "server"),
    Moment("after the exchange", ("observe",), "server"),
    Moment("aggregation", ("rewrite", "release", "integers"), "server"),
    Moment("after the update", ("mix", "follow"), "server"),
    Moment("accounting", ("account", "report"), "server"),
    Moment("evaluation", ("evaluated", "deploy", "personalise"), "server and clients"),
)
"""All moments in the order of a round."""


def moments_of(part: Part) -> list[str]:
    """Return the names of the moments in which a part acts."""
    hooks = part.hooks()
    return [moment.name for moment in MOMENTS if hooks.intersection(moment.hooks)]


def parts_by_hook() -> dict[str, list[str]]:
    """Return the names of the registered parts that can act in each hook."""
    by_hook: dict[str, list[str]] = {name: [] for name in HOOKS}
    for entry in algorithms:
        if issubclass(entry.make, Part):
            for name in hooks_of(entry.make):
                by_hook[name].append(entry.name)
    return by_hook
