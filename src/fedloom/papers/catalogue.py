"""All tables and figures by name."""

from __future__ import annotations

from functools import cache

from fedloom.errors import InvalidValue, suggestion
from fedloom.papers import fedala, fedmr, fedumf
from fedloom.papers.protocols import Exhibit

PAPERS = {
    "fedmr": "FedMR, long version (arXiv 2305.10730)",
    "fedmr-kdd": "FedMR, KDD 2024",
    "fedmr-first": "FedMR, first version (arXiv 2208.07677)",
    "fedumf": "FedUmf (Mathematics 2022)",
    "fedala": "FedALA (AAAI 2023)",
}

DRAWINGS = {**fedmr.DRAWINGS, **fedumf.DRAWINGS, **fedala.DRAWINGS}


@cache
def exhibits() -> dict[str, Exhibit]:
    """Every table and figure that has something to run, paper by paper."""
    found = [*fedmr.exhibits(), *fedumf.exhibits(), *fedala.exhibits()]
    return {one.id: one for paper in PAPERS for one in found if one.id.partition(".")[0] == paper}


def exhibit(name: str) -> Exhibit:
    """The table or figure called `fedumf.table-a2`. Raises `InvalidValue` for a drawing and any other name, with the nearest."""
    known = exhibits()
    if name in DRAWINGS:
        raise InvalidValue(f"{name} is {DRAWINGS[name]}: nothing to run")
    if name not in known:
        near = suggestion(name, [*known, *PAPERS])
        raise InvalidValue(f"no table or figure is called {name!r}:{near} (fedloom reproduce lists all {len(known)})")
    return known[name]
