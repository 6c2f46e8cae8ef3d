"""All papers with their tables and figures."""

from functools import cache

from fedloom.common.errors import InvalidValue, UnknownName, suggestion
from fedloom.reviews.papers.paper import Paper
from fedloom.reviews.papers.protocols import Exhibit
from fedloom.reviews.papers.published.fedala_paper import FEDALA
from fedloom.reviews.papers.published.fedbench_paper import FEDBENCH
from fedloom.reviews.papers.published.fedmr_paper import FEDMR
from fedloom.reviews.papers.published.fedumf_paper import FEDUMF
from fedloom.reviews.papers.published.mcmahan_paper import MCMAHAN
from fedloom.reviews.papers.published.niid_bench_paper import NIID_BENCH

PAPERS = {
    "fedmr": FEDMR,
    "fedumf": FEDUMF,
    "fedala": FEDALA,
    "mcmahan": MCMAHAN,
    "niid-bench": NIID_BENCH,
    "fedbench": FEDBENCH,
}


def paper(name: str) -> Paper:
    """Return a paper, such as `fedmr`. Raises `UnknownName` for an unknown paper."""
    if name not in PAPERS:
        raise UnknownName("paper", name, PAPERS)
    return PAPERS[name]


def titles() -> dict[str, str]:
    """Return the titles of all versions of all papers, by the prefix of their tables and
    figures.
    """
    return {version: title for one in PAPERS.values() for version, title in one.titles.items()}


@cache
def exhibits() -> dict[str, Exhibit]:
    """Return every table and figure that has something to run, paper by paper."""
    return {exhibit.id: exhibit for one in PAPERS.values() for exhibit in one.exhibits()}


def not_run() -> dict[str, str]:
    """Return the tables and figures with nothing to run, and why."""
    return {exhibit: reason for one in PAPERS.values() for exhibit, reason in one.not_run.items()}


def exhibit(name: str) -> Exhibit:
    """Return the table or figure called `fedumf.table-a2`. Raises `InvalidValue` for one with
    nothing to run, or unknown.
    """
    entries = exhibits()
    nothing = not_run()
    if name in nothing:
        raise InvalidValue(f"{name} is {nothing[name]}: nothing to run")
    if name not in entries:
        near = suggestion(name, [*entries, *titles()])
        raise InvalidValue(
            f"no table or figure is called {name!r}{near} (fedloom paper reproduce lists all "
            f"{len(entries)})"
        )
    return entries[name]
