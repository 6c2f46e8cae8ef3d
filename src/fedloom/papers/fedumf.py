"""FedUmf's settings, methods, tables and figures.

Main part (tables 1 to 4): 100 clients, batch 50, one local epoch, momentum 0.5, weight decay 5e-4; McMahan's CNN on MNIST for 150
rounds, ResNet-18 on CIFAR-10 for 300. Appendix (tables A1 and A2): FedDC's protocol with one local epoch, rate 0.1 decayed by
0.998, weight decay 1e-3, clipping at 10; 300 rounds on MNIST and EMNIST-L, 600 on CIFAR.
"""

from __future__ import annotations

import math
from typing import Any

from fedloom.papers.needs import FACTS
from fedloom.papers.numbers import printed
from fedloom.papers.protocols import (
    Beside,
    Cell,
    Exhibit,
    Measure,
    Printed,
    Setting,
    heterogeneity,
    percent,
)

LABELS = {"mnist": "MNIST", "emnist_l": "EMNIST-L", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}

APPENDIX = ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn", "FedDC", "FedUmf+FedDC")

_PARTITIONS = {
    "iid": "iid",
    "pathological:2": "shards(2)",
    "iid_lognormal:0.3": "lognormal(0.3)",
    "dir_class_prior:0.6": "class_prior(0.6)",
}
_APPENDIX_MODELS = {
    "mnist": "feddc_fcn(hidden=200)",
    "emnist_l": "feddc_fcn(hidden=100)",
    "cifar10": "feddc_cnn",
    "cifar100": "feddc_cnn",
}
_UNIFORM = "fedavg(weighted=false)"

SYNTHETIC_ROUNDS = 200
"""Of figure A5; the paper does not say how many, so this number is ours."""


def main_setting(data: str, distribution: str, participation: float, rate: float) -> Setting:
    """A setting of tables 1 to 4 and figures 3 to 10."""
    kind = "IID" if distribution == "iid" else "non-IID"
    return Setting(
        paper="fedumf",
        name=f"{LABELS[data]} {kind} {percent(participation)} rate {rate:g}",
        data=data,
        clients=100,
        partition=_PARTITIONS[distribution],
        model="mcmahan_cnn" if data == "mnist" else "resnet18(stem=cifar)",
        training={"learning_rate": rate, "momentum": 0.5, "weight_decay": 5e-4, "batch_size": 50, "epochs": 1},
        rounds=150 if data == "mnist" else 300,
        participation=participation,
        evaluate_every=1,
    )


def appendix_setting(data: str, distribution: str, participation: float, method: str = "") -> Setting:
    """A setting of tables A1 and A2 and figures A1 to A4.

    For SCAFFOLD as `method`, every client takes as many steps as one of mean size, E ceil(mean n / B), as in FedDC's code;
    sizes differ in the unbalanced partition alone.
    """
    equal = method == "SCAFFOLD" and distribution.startswith("iid_lognormal")
    colour = data.startswith("cifar")
    balanced = data == "cifar100" and distribution == "iid"  # exactly 5 images of each class a client
    return Setting(
        paper="fedumf",
        name=f"{LABELS[data]} {heterogeneity(distribution)} {percent(participation)}",
        data=data,
        clients=100,
        partition="iid(balanced=true)" if balanced else _PARTITIONS[distribution],
        model=_APPENDIX_MODELS[data],
        training={
            "learning_rate": 0.1,
            "decay": 0.998,
            "weight_decay": 1e-3,
            "clip": 10.0,
            "batch_size": 50,
            "epochs": 1,
            **({"augmentation": "flip_crop"} if colour else {}),
            **({"steps": math.ceil(FACTS[data].train / 100 / 50)} if equal else {}),
        },
        rounds=600 if colour else 300,
        participation=participation,
        evaluate_every=1,
        only=method if equal else "",
    )


def synthetic_setting(alpha: int, beta: int, participation: float) -> Setting:
    """A setting of figure A5: FedDC's generator, tested on what is trained on as in FedDC's code."""
    return Setting(
        paper="fedumf",
        name=f"synthetic ({alpha},{beta}) {percent(participation)}",
        data=f"synthetic_feddc(alpha={alpha}, beta={beta}, test=train)",
        clients=20,
        partition="natural",
        model="logistic(zero_init=true)",
        training={"learning_rate": 0.1, "weight_decay": 1e-5, "clip": 10.0, "batch_size": 10, "epochs": 10},
        rounds=SYNTHETIC_ROUNDS,
        participation=participation,
        evaluate_every=1,
    )


def fusion(alpha: float) -> str:
    """FedUmf over plain averaging with equal weights (algorithm 1)."""
    return f"umf({_UNIFORM}, alpha={alpha:g})"


def appendix_method(name: str, data: str, distribution: str) -> str:
    """A method of the appendix, with FedDC's code's variants: its own way to count the proximal term and to divide."""
    alpha = 0.5 if data == "cifar10" and distribution == "dir_class_prior:0.6" else 1.0
    feddc = "feddc(alpha=0.01, divisor=base, nominal_steps=true)"
    return {
        "FedAvg": "fedavg",
        "FedProx": "fedprox(mu=0.0001, prox_factor=1.0)",
        "SCAFFOLD": "scaffold(size_scaled=true, divisor=base)",
        "FedDyn": "feddyn(alpha=0.01)",
        "FedDC": feddc,
        "FedUmf+FedDC": f"umf({feddc}, alpha={alpha:g})",
    }[name]


def main_table(table: str) -> list[Cell]:
    """Tables 1 to 4: rounds to each target."""
    found = []
    for number in printed("fedumf", table):
        where = main_setting(number["dataset"], number["heterogeneity"], number["participation"], number["lr"])
        target = number["target_acc_pct"]
        algorithm = _UNIFORM if number["method"] == "FedAvg" else fusion(number["alpha"])
        column = f"{where.name} to {target}%"
        measure = Measure("rounds", float(target))
        found.append(Cell(number["method"], column, where, algorithm, measure, Printed(number["rounds"])))
    return found


def appendix_table(table: str) -> list[Cell]:
    """Table A1 (accuracy) or A2 (rounds to the data set's target, and how many times fewer they are than FedAvg's)."""
    found, ratios = [], []
    for number in printed("fedumf", table):
        data, distribution, name = number["dataset"], number["heterogeneity"], number["method"]
        where = appendix_setting(data, distribution, number["participation"], name)
        algorithm = appendix_method(name, data, distribution)
        if table == "A1":
            found.append(Cell(name, where.name, where, algorithm, Measure("best"), Printed(number["mean"])))
        else:
            target = number["target_acc_pct"]
            measure = Measure("rounds", float(target))
            column = f"{where.name} to {target}%"
            found.append(Cell(name, column, where, algorithm, measure, Printed(number["rounds"])))
            if name != "FedAvg":
                plain = appendix_setting(data, distribution, number["participation"])
                beside = Beside("FedAvg", plain, appendix_method("FedAvg", data, distribution))
                faster, speed = Measure("speedup", float(target)), Printed(number["speedup"])
                ratios.append(Cell(name, f"{column} speed-up", where, algorithm, faster, speed, beside))
    return [*found, *ratios]


def main_figure(data: str, distribution: str, rate: float) -> list[Cell]:
    """Figures 3 to 10: FedAvg and FedUmf with three alphas, at two participations."""
    rows = {"FedAvg": _UNIFORM} | {f"FedUmf {alpha:g}": fusion(alpha) for alpha in (0.1, 0.5, 1.0)}
    settings = [main_setting(data, distribution, share, rate) for share in (0.1, 0.5)]
    return [
        Cell(row, where.name, where, algorithm, Measure("best"))
        for where in settings
        for row, algorithm in rows.items()
    ]


def appendix_figure(data: str) -> list[Cell]:
    """Figures A1 to A4: the runs of tables A1 and A2."""
    found = []
    for share in (0.15, 0.65):
        for distribution in ("iid", "iid_lognormal:0.3", "dir_class_prior:0.6"):
            for name in APPENDIX:
                where = appendix_setting(data, distribution, share, name)
                algorithm = appendix_method(name, data, distribution)
                found.append(Cell(name, where.name, where, algorithm, Measure("best")))
    return found


def synthetic_figure() -> list[Cell]:
    """Figure A5."""
    found = []
    for share in (0.15, 0.65):
        for alpha, beta in ((0, 0), (0, 1), (1, 0)):
            where = synthetic_setting(alpha, beta, share)
            found += [
                Cell(name, where.name, where, appendix_method(name, "synthetic", "natural"), Measure("best"))
                for name in APPENDIX
            ]
    return found


def exhibits() -> list[Exhibit]:
    """All tables and figures."""
    tables = {
        "1": "rounds to an accuracy, MNIST IID",
        "2": "rounds to an accuracy, MNIST non-IID",
        "3": "rounds to an accuracy, CIFAR-10 IID",
        "4": "rounds to an accuracy, CIFAR-10 non-IID",
    }
    figures = [
        (data, distribution, rate)
        for data in ("mnist", "cifar10")
        for distribution in ("iid", "pathological:2")
        for rate in (0.01, 0.05)
    ]
    return [
        *(Exhibit(f"fedumf.table-{k}", shows, _table_of(k)) for k, shows in tables.items()),
        Exhibit("fedumf.table-a1", "test accuracy beside FedDC and others, 4 data sets", lambda: appendix_table("A1")),
        Exhibit("fedumf.table-a2", "rounds to one accuracy a data set", lambda: appendix_table("A2")),
        *(
            Exhibit(f"fedumf.figure-{3 + place}", _named(*figure), _figure_of(*figure))
            for place, figure in enumerate(figures)
        ),
        *(
            Exhibit(f"fedumf.figure-a{k}", f"curves of all methods, {LABELS[data]}", _appendix_of(data))
            for k, data in enumerate(LABELS, start=1)
        ),
        Exhibit("fedumf.figure-a5", "curves of all methods, synthetic data", synthetic_figure),
    ]


def _named(data: str, distribution: str, rate: float) -> str:
    return f"FedUmf's alpha, {LABELS[data]} {'IID' if distribution == 'iid' else 'non-IID'}, rate {rate:g}"


def _table_of(table: str) -> Any:
    return lambda: main_table(table)


def _figure_of(data: str, distribution: str, rate: float) -> Any:
    return lambda: main_figure(data, distribution, rate)


def _appendix_of(data: str) -> Any:
    return lambda: appendix_figure(data)


DRAWINGS = {"fedumf.figure-1": "a drawing", "fedumf.figure-2": "a drawing"}
