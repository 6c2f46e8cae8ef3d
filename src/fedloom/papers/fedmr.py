"""FedMR's settings, methods, tables and figures: the long version (arXiv), KDD 2024, and the first version.

The protocol (long version, section 5.1, with the authors' code where the paper is silent): 100 clients (180 writers for FEMNIST),
10 % a round, SGD with rate 0.01 and momentum 0.9, batch 50, 5 local epochs, 1,000 rounds, no augmentation. Where the papers'
code differs from their text, these settings follow the code, which made the tables: recombination of single tensors, CIFAR-100
with its 20 coarse labels, and so on (docs/reproduce.md lists all).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedloom.papers.numbers import printed
from fedloom.papers.protocols import (
    Cell,
    Exhibit,
    Measure,
    Printed,
    Recorders,
    Setting,
    heterogeneity,
    nothing,
)

ROUNDS = 1000

MODELS = {"cnn": ("CNN", "fedmr_cnn"), "resnet20": ("ResNet-20", "fedmr_resnet20"), "vgg16": ("VGG-16", "fedmr_vgg16")}

DATA = {
    "cifar10": ("CIFAR-10", "cifar10(normalise=half)"),
    "cifar100": ("CIFAR-100", "cifar100_coarse"),
    "femnist": ("FEMNIST", "femnist"),
}

DISTRIBUTIONS = ("dir:0.1", "dir:0.5", "dir:1.0", "iid")

LONG = ("FedAvg", "FedProx", "SCAFFOLD", "MOON", "FedGen", "CluSamp", "FedMR")
KDD = ("FedAvg", "FedProx", "FedGen", "CluSamp", "FedExP", "FedASAM", "FedMut", "FedMR")

FEDMR = "fedmr(unit=tensor)"
FIRST_STAGE = "fedavg(weighted=false)"
PAIR = {"FedAvg": "fedavg", "FedMR": FEDMR}

CHANGES: dict[str, dict[str, Any]] = {"SCAFFOLD": {"weight_decay": 1e-5, "clip": 10.0}}
"""What of local training the authors' code changes for one method."""

_MU = {"cifar10": 0.01, "cifar100": 0.001, "femnist": 0.1}
_MOON = {"cifar10": 5.0, "cifar100": 1.0, "femnist": 1.0}
_FEDGEN = {"cifar10": (0.2, 0.2, 0.0003), "cifar100": (10.0, 1.0, 0.0001), "femnist": (10.0, 10.0, 0.0003)}

LAST = Measure("end")


def setting(
    model: str,
    data: str,
    distribution: str,
    *,
    participants: int | None = None,
    record: Recorders = nothing,
    method: str = "",
) -> Setting:
    """A setting in the words of the numbers, such as `setting("cnn", "cifar10", "dir:0.1")`.

    `participants` of the 100 clients take part in a round (10 %); for SCAFFOLD as `method`, local training differs.
    """
    kind, _, value = distribution.partition(":")
    partition = f"dirichlet({value})" if kind == "dir" else {"iid": "iid", "natural": "natural"}[distribution]
    words = [MODELS[model][0], DATA[data][0], heterogeneity(distribution)]
    if participants is not None:
        words.append(f"K={participants}")
    return Setting(
        paper="fedmr",
        name=" ".join(words),
        data=DATA[data][1],
        clients=0 if distribution == "natural" else 100,  # natural: everyone there is
        partition=partition,
        model=MODELS[model][1],
        training={"learning_rate": 0.01, "momentum": 0.9, "batch_size": 50, "epochs": 5, **CHANGES.get(method, {})},
        rounds=ROUNDS,
        participation=0.1 if participants is None else participants / 100,
        evaluate_every=10,
        record=record,
        only=method if method in CHANGES else "",
    )


def method(name: str, model: str, data: str) -> str:
    """The method that a table's column is headed with, with the parameters for the model and the data."""
    alpha, beta, rate = _FEDGEN[data]
    return {
        "FedAvg": "fedavg",
        "FedProx": f"fedprox(mu={_MU[data]})",
        "SCAFFOLD": "scaffold",
        "MOON": f"moon(mu={_MOON[data]}, temperature=0.5)",
        "FedGen": f"fedgen(alpha={alpha}, beta={beta}, generator_learning_rate={rate})",
        "CluSamp": "clusamp(weight=size)",
        "FedExP": "fedexp(epsilon=0.1, epsilon_by_clients=true)",
        "FedASAM": "fedasam(rho=0.1, eta=0.0)",
        "FedMut": "fedmut(radius=4.0, beta=0.3, mutation_rounds=50)",
        "FedMR": two_stages(0 if model == "cnn" else 100),
    }[name]


def two_stages(rounds: int) -> str:
    """FedMR-n: `rounds` of plain averaging first (equal weights, as the code has it)."""
    return FEDMR if rounds == 0 else f"stages({FIRST_STAGE}:{rounds}, {FEDMR})"


def curves(
    methods: Iterable[str],
    model: str,
    data: str,
    distributions: Iterable[str],
    *,
    participants: int | None = None,
    record: Recorders = nothing,
) -> list[Cell]:
    """Cells of a figure: every method in every distribution, without a printed number."""
    found = []
    for distribution in distributions:
        for name in methods:
            where = setting(model, data, distribution, participants=participants, record=record, method=name)
            found.append(Cell(name, where.name, where, method(name, model, data), LAST))
    return found


def variants(rows: dict[str, str], model: str, distribution: str, record: Recorders = nothing) -> list[Cell]:
    """Cells of a figure on CIFAR-10 that compares methods of its own making, by row."""
    where = setting(model, "cifar10", distribution, record=record)
    return [Cell(row, where.name, where, algorithm, LAST) for row, algorithm in rows.items()]


def table(paper: str) -> list[Cell]:
    """Table 1 of the long version (`fedmr`) or of KDD 2024 (`fedmr-kdd`)."""
    found = []
    for number in printed(paper, "1"):
        model, data, name = number["model"], number["dataset"], number["method"]
        where = setting(model, data, number["heterogeneity"], method=name)
        value = Printed(number["mean"], number["std"])
        found.append(Cell(name, where.name, where, method(name, model, data), LAST, value))
    return found


def first_table() -> list[Cell]:
    """Table I of the first version, of which only the text's two values are known; they are those of the long version."""
    quoted = {"SCAFFOLD": Printed(50.46), "FedMR": Printed(62.09)}
    home = setting("resnet20", "cifar10", "dir:0.1").name
    found = []
    for cell in table("fedmr"):
        known = quoted.get(cell.row) if cell.column == home else None
        found.append(Cell(cell.row, cell.column, cell.setting, cell.algorithm, cell.measure, known))
    return found


def communication(names: Iterable[str]) -> list[Cell]:
    """Appendix C.1: models sent and received in a round by all K = 10 clients, counted.

    FedGen's generator and the variates of SCAFFOLD are counted in models of the same size, so what the paper says of them in
    words depends on the model; the printed number is left out there.
    """
    where = setting("cnn", "cifar10", "iid")
    two_rounds = Setting(**{**vars(where), "name": f"{where.name} traffic", "rounds": 2, "evaluate_every": 2})
    said = {"SCAFFOLD": Printed(40.0), "FedGen": None}
    return [
        Cell(name, two_rounds.name, two_rounds, _one_stage(name), Measure("models"), said.get(name, Printed(20.0)))
        for name in names
    ]


def _one_stage(name: str) -> str:
    return method(name, "cnn", "cifar10")


def _similarity(rounds: int) -> tuple[str, ...]:
    return (f"similarity(every={max(1, rounds // 100)})",)


def _aggregate(rounds: int) -> tuple[str, ...]:
    return (f"aggregate(every={max(1, min(10, rounds // 10))}, models=4)",)


def _independent() -> list[Cell]:
    return variants({"FedAvg": "fedavg", "Indep": "indep"}, "resnet20", "dir:0.5", _aggregate)


def _cosine() -> list[Cell]:
    return [cell for d in DISTRIBUTIONS for cell in variants({"FedMR": FEDMR}, "resnet20", d, _similarity)]


def _landscape(rounds: int) -> tuple[str, ...]:
    return ("landscape",)


def _landscapes() -> list[Cell]:
    return [cell for d in ("dir:0.1", "dir:1.0") for cell in variants(PAIR, "resnet20", d, _landscape)]


def _losses() -> list[Cell]:
    return [cell for d in DISTRIBUTIONS for cell in variants(PAIR, "resnet20", d)]


def _participants(names: Iterable[str], distribution: str) -> list[Cell]:
    return [
        cell
        for count in (5, 10, 20, 50, 100)
        for cell in curves(names, "resnet20", "cifar10", [distribution], participants=count)
    ]


def _segments() -> list[Cell]:
    rows = {"FedMR": FEDMR} | {
        f"FedMR-p{share:g}": f"fedmr(unit=segment, fraction={share})" for share in (0.1, 0.25, 0.5, 1.0)
    }
    return [cell for model in ("resnet20", "vgg16") for cell in variants(rows, model, "dir:1.0")]


def _stage_lengths() -> list[Cell]:
    rows = {f"FedMR-{n}": two_stages(n) for n in (0, 50, 100, 150, 200)}
    return [cell for model in ("resnet20", "vgg16") for cell in variants(rows, model, "dir:1.0")]


def _grid(names: Iterable[str], model: str) -> list[Cell]:
    found = [c for data in ("cifar10", "cifar100") for c in curves(names, model, data, DISTRIBUTIONS)]
    return [*found, *curves(names, model, "femnist", ["natural"])]


def _first_ablation() -> list[Cell]:
    rows = {"FedAvg": "fedavg", "FedMR w/o MR": "indep", "FedMR": two_stages(100)}
    return variants(rows, "resnet20", "iid")


def _first_stages() -> list[Cell]:
    rows = {"FedAvg": "fedavg"} | {f"FedMR-{n}": two_stages(n) for n in (0, 100, 200)}
    return variants(rows, "resnet20", "dir:1.0")


def exhibits() -> list[Exhibit]:
    """All tables and figures of the three versions."""
    return [
        Exhibit("fedmr.table-1", "test accuracy, 3 models x 9 distributions x 7 methods", lambda: table("fedmr")),
        Exhibit("fedmr.communication", "appendix C.1: models sent a round", lambda: communication(LONG)),
        *_ablations("fedmr", 4, LONG),
        *(
            Exhibit(f"fedmr.figure-{number}", f"learning curves of all methods, {MODELS[m][0]}", _grid_of(LONG, m))
            for number, m in ((13, "cnn"), (14, "resnet20"), (15, "vgg16"))
        ),
        Exhibit("fedmr.figure-16", "K activated clients, IID", lambda: _participants(LONG, "iid")),
        Exhibit("fedmr.figure-17", "K activated clients, Dir(0.1)", lambda: _participants(LONG, "dir:0.1")),
        Exhibit(
            "fedmr-kdd.table-1", "test accuracy, 3 models x 9 distributions x 8 methods", lambda: table("fedmr-kdd")
        ),
        Exhibit("fedmr-kdd.communication", "models sent a round", lambda: communication(KDD)),
        *_ablations("fedmr-kdd", 5, KDD),
        Exhibit("fedmr-first.table-1", "test accuracy (Table I; the text quotes two numbers)", first_table),
        Exhibit(
            "fedmr-first.figure-3",
            "learning curves, ResNet-20 on CIFAR-100",
            lambda: curves(LONG, "resnet20", "cifar100", DISTRIBUTIONS),
        ),
        Exhibit("fedmr-first.figure-4", "FedMR with and without recombination, IID", _first_ablation),
        Exhibit("fedmr-first.figure-5", "two-stage training, three lengths", _first_stages),
        *(
            Exhibit(f"fedmr-first.figure-{number}", f"learning curves, {MODELS[m][0]}", _grid_of(LONG, m))
            for number, m in ((6, "cnn"), (7, "resnet20"), (8, "vgg16"))
        ),
    ]


def _grid_of(names: Iterable[str], model: str) -> Any:
    return lambda: _grid(names, model)


def _ablations(paper: str, first: int, names: Iterable[str]) -> list[Exhibit]:
    """The eight figures that the long version and KDD 2024 share, numbered from `first` on."""
    shown: list[tuple[str, Any]] = [
        ("FedAvg, four independent models and their mean", _independent),
        ("cosine similarity of the pool's models", _cosine),
        ("loss landscapes of FedAvg and FedMR", _landscapes),
        ("test loss of FedAvg and FedMR", _losses),
        (
            "learning curves, ResNet-20 on CIFAR-100",
            lambda: curves(names, "resnet20", "cifar100", DISTRIBUTIONS),
        ),
        ("K activated clients, Dir(0.1)", lambda: _participants(names, "dir:0.1")),
        ("recombination of segments (FedMR-px)", _segments),
        ("two-stage training, five lengths", _stage_lengths),
    ]
    return [Exhibit(f"{paper}.figure-{first + place}", what, make) for place, (what, make) in enumerate(shown)]


DRAWINGS = {
    **dict.fromkeys(("fedmr.figure-1", "fedmr.figure-2", "fedmr.figure-3", "fedmr.figure-12"), "a drawing"),
    **dict.fromkeys((*(f"fedmr-kdd.figure-{k}" for k in (1, 2, 3, 4, 13)),), "a drawing"),
    **dict.fromkeys(("fedmr-first.figure-1", "fedmr-first.figure-2"), "a drawing"),
}
