"""The papers' protocols, and measured values next to the printed values."""

from __future__ import annotations

import json
import math
import statistics
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.common.errors import InvalidValue
from fedloom.common.expression import parse
from fedloom.parts.building import build
from fedloom.report.summary import RunSummary
from fedloom.reviews.papers.library import exhibit, exhibits, paper
from fedloom.reviews.papers.measure import Measured, deviations, difference, judged, measured
from fedloom.reviews.papers.paper_data import FACTS
from fedloom.reviews.papers.plan import ReproduceOptions, plan
from fedloom.reviews.papers.printed import printed
from fedloom.reviews.papers.protocols import Measure, PaperCell, Printed, Setting
from fedloom.runs.config_file import configuration
from papers_support import numbers_of

FEDMR, FEDUMF, FEDALA = paper("fedmr"), paper("fedumf"), paper("fedala")
NUMBERS = Path(__file__).resolve().parents[3] / "shared" / "spec" / "paper_numbers.json"


def appendix(
    data: str, distribution: str, participation: float = 0.15, method: str = ""
) -> Setting:
    """Return a setting from FedUmf's tables A1 and A2."""
    words = {"part": "appendix", "dataset": data, "heterogeneity": distribution}
    return FEDUMF.experiment(**words, participation=participation, method=method)


def appendix_method(name: str, data: str, distribution: str) -> str:
    return FEDUMF.algorithm(name, part="appendix", dataset=data, heterogeneity=distribution)


# protocols
# ----------------------------------------------------------------------------------------------------------------


def test_every_setting_is_a_valid_configuration_and_every_method_can_be_built() -> None:
    cells = [cell for table in exhibits().values() for cell in table.cells]
    for algorithm in {cell.algorithm for cell in cells}:
        build(algorithm)
    tables: dict[str, PaperCell] = {}
    for cell in cells:
        for rounds in (3, cell.setting.rounds):
            tables[json.dumps(cell.setting.table(rounds))] = cell
    for text, cell in tables.items():
        settings = configuration({**json.loads(text), "algorithm": cell.algorithm})
        assert settings.schedule.rounds >= (settings.schedule.evaluate_every or 0)
        assert parse(settings.data.name).name in FACTS


def test_every_printed_number_has_a_cell() -> None:
    tables = [("fedmr", "1"), ("fedmr-kdd", "1"), *(("fedala", k) for k in "247")]
    tables += [("fedumf", k) for k in ("1", "2", "3", "4", "A1", "A2")]
    tables += [
        *(("mcmahan", k) for k in ("1-2NN", "1-CNN", "2")),
        ("niid-bench", "MNIST"),
        ("niid-bench", "CIFAR-10"),
        ("fedbench", "MNIST"),
    ]
    for version, table in tables:
        numbers = printed(version, table)
        every = exhibit(f"{version}.table-{table.lower()}").cells
        cells = [cell for cell in every if cell.baseline is None]
        assert [cell.row for cell in cells] == [number["method"] for number in numbers]
        shown = [None if c.printed is None else c.printed.mean for c in cells]
        assert shown == [
            number["rounds"] if "rounds" in number else number["mean"] for number in numbers
        ]
        assert len({(cell.row, cell.column) for cell in every}) == len(every)


@pytest.mark.parametrize(
    ("name", "figure", "kind", "left_out"),
    [
        ("fedumf.table-a2", "speedup", "speedup", {"FedAvg"}),
        ("fedala.table-4", "improvement", "improvement", set()),
    ],
)
def test_columns_that_compare_two_runs_hold_what_is_printed(
    name: str, figure: str, kind: str, left_out: set[str]
) -> None:
    cells = [cell for cell in exhibit(name).cells if cell.measure.kind == kind]
    numbers = [
        n for n in numbers_of(name) if n.get(figure) is not None and n["method"] not in left_out
    ]
    assert [(cell.row, cell.printed and cell.printed.mean) for cell in cells] == [
        (number["method"], number[figure]) for number in numbers
    ]
    for cell in cells:
        assert cell.baseline is not None
        baseline_row = "FedAvg" if kind == "speedup" else cell.row.removesuffix("+ALA")
        assert cell.baseline.row == baseline_row
        assert (cell.baseline.setting.name, cell.baseline.setting.only) == (cell.setting.name, "")
        assert parse(cell.baseline.algorithm).name == parse(FEDALA.methods[baseline_row]).name


@pytest.mark.skipif(not NUMBERS.exists(), reason="the specification is not beside the repository")
def test_the_numbers_in_the_package_are_those_of_the_specification() -> None:
    papers = {"000": "fedmr", "001": "fedumf", "002": "fedmr-kdd", "003": "fedala"}
    specified = [{"paper": papers[n.pop("seed")], **n} for n in json.loads(NUMBERS.read_text())]
    shipped = json.loads(
        (files("fedloom.reviews.papers") / "numbers.json").read_text(encoding="utf-8")
    )
    assert [number for number in shipped if number["paper"] in papers.values()] == specified


def test_protocols_equal_the_papers() -> None:
    words = {"model": "cnn", "dataset": "cifar10", "heterogeneity": "iid"}
    settings = FEDMR.experiment(model="cnn", dataset="cifar10", heterogeneity="dir:0.1").table(1000)
    assert settings["training"] == {
        "learning_rate": 0.01,
        "momentum": 0.5,
        "batch_size": 50,
        "epochs": 5,
    }
    assert (settings["participation"], settings["evaluate_every"], settings["model"]) == (
        0.1,
        10,
        "fedmr_cnn",
    )
    assert settings["data"] == {
        "name": "cifar10(normalise=half)",
        "clients": 100,
        "partition": "dirichlet(0.1)",
    }
    assert (
        FEDMR.algorithm("FedMR", model="vgg16", dataset="cifar10")
        == "stages(fedavg(weighted=false):100, fedmr(unit=tensor))"
    )
    assert FEDMR.algorithm("FedProx", dataset="femnist") == "fedprox(mu=0.1)"
    assert [FEDMR.experiment(**words, share=k / 100).participation for k in (5, 100)] == [0.05, 1.0]

    main_part = FEDUMF.experiment(
        part="main", dataset="mnist", heterogeneity="pathological:2", participation=0.5, lr=0.05
    )
    assert main_part.training == {
        "learning_rate": 0.05, "momentum": 0.5, "weight_decay": 5e-4, "batch_size": 50, "epochs": 1,
    }  # fmt: skip
    assert (main_part.rounds, main_part.partition, main_part.model) == (
        150,
        "shards(2)",
        "mcmahan_cnn",
    )
    assert (
        FEDUMF.experiment(
            part="main", dataset="cifar10", heterogeneity="iid", participation=0.1, lr=0.01
        ).rounds
        == 300
    )
    coloured = appendix("cifar100", "iid", 0.65)
    assert coloured.training["decay"] == 0.998
    assert coloured.training["clip"] == 10.0
    assert coloured.training["augmentation"] == "flip_crop"
    assert (coloured.rounds, coloured.partition, coloured.model) == (
        600,
        "iid(balanced=true)",
        "feddc_cnn",
    )
    assert appendix("emnist_l", "iid").model == "feddc_fcn(hidden=100)"
    assert "alpha=0.5" in appendix_method("FedUmf+FedDC", "cifar10", "dir_class_prior:0.6")
    assert "alpha=1" in appendix_method("FedUmf+FedDC", "cifar10", "iid")

    personal = FEDALA.experiment(dataset="cifar100", heterogeneity="pathological:10").table(2000)
    assert personal["data"] == {
        "name": "cifar100(normalise=half)", "clients": 20, "partition": "pathological(10)", "local_test": 0.25, "merge": True,
    }  # fmt: skip
    assert personal["training"] == {
        "learning_rate": 0.005,
        "batch_size": 10,
        "epochs": 1,
        "drop_last": True,
    }
    assert (personal["participation"], personal["personal_every"], personal["rounds"]) == (
        1.0,
        1,
        2000,
    )
    rates = [
        FEDALA.experiment(dataset=d, heterogeneity="dir:0.1", model=m).training["learning_rate"]
        for d, m in _FAST
    ]
    assert rates == [0.1, 0.1, 0.1]
    assert (
        FEDALA.experiment(dataset="cifar100", heterogeneity="dir:0.1", clients=100).partition
        == "dirichlet(0.1, minimum=40)"
    )
    assert FEDALA.experiment(dataset="mnist", heterogeneity="dir:0.1").seeds == [0, 1, 2, 3, 4]


def test_methods_follow_the_papers_code_that_made_the_tables() -> None:
    def fields(text: str) -> dict[str, Any]:
        return vars(build(text))

    assert [
        fields(FEDMR.algorithm("MOON", dataset=data))["mu"]
        for data in ("cifar10", "cifar100", "femnist")
    ] == [
        5.0,
        1.0,
        1.0,
    ]
    assert fields(FEDMR.algorithm("CluSamp"))["weight"] == "size"
    feddc = fields(appendix_method("FedDC", "mnist", "iid"))
    assert feddc["alpha"] == 0.01
    assert appendix_method("FedDC", "mnist", "iid").startswith("feddc_code(")

    assert fields(FEDALA.algorithm("Per-FedAvg"))["passes"] == 2
    assert fields(FEDALA.algorithm("FedAMP"))["norm"] == "plain"
    assert fields(FEDALA.algorithm("pFedMe"))["inner_weight_decay"] == 0.001
    assert fields(FEDALA.algorithm("FedPHP"))["deployed"] == "local"
    learning = ("threshold", "rate", "percent", "p")
    for name, code in (("FedALA", "fedala_code("), ("Ditto+ALA", "ala_code(")):
        options = fields(FEDALA.algorithm(name))
        assert [options[key] for key in learning] == [0.01, 1.0, 80.0, 1]
        assert FEDALA.algorithm(name).startswith(code)
    assert {cell.setting.partition for cell in exhibit("fedala.figure-3").cells} == {
        "dirichlet(0.1, minimum=40)"
    }


def test_batch_norm_statistics_never_travel_with_resnet_in_the_fedala_tables() -> None:
    assert FEDALA.algorithm("FedAvg", model="cnn4") == "fedavg"
    cells = [
        c
        for name in "123"
        for c in exhibit(f"fedala.table-{name}").cells
        if c.setting.model == "resnet18"
    ]
    assert {cell.row for cell in cells} >= {name for name in FEDALA.methods if "+" not in name}
    for cell in cells:
        method = build(cell.algorithm)
        assert getattr(method, "buffers") == "local"  # noqa: B009
    prox = build(FEDALA.algorithm("FedProx", model="resnet18"))
    assert (vars(prox)["mu"], vars(prox)["finetune_epochs"]) == (0.001, 0)


def test_scaffold_takes_equal_steps_on_unbalanced_clients_alone_and_fewer_of_fewer_samples() -> (
    None
):
    def steps(data: str, distribution: str, method: str) -> int | None:
        return appendix(data, distribution, method=method).training.get("steps")

    unbalanced = "iid_lognormal:0.3"
    assert [
        steps(data, unbalanced, "SCAFFOLD") for data in ("mnist", "emnist_l", "cifar10", "cifar100")
    ] == [
        12,
        10,
        10,
        10,
    ]
    assert steps("mnist", unbalanced, "FedDC") is None  # fixes the divisor, not the steps
    assert steps("mnist", "dir_class_prior:0.6", "SCAFFOLD") is None  # all clients have one size

    def planned(**limits: Any) -> dict[str, int | None]:
        chosen = ReproduceOptions(
            rows=("SCAFFOLD", "FedDC"), columns=("MNIST unbalanced 15% to 95%",), **limits
        )
        return {
            key: settings.training.steps
            for key, settings in plan(exhibit("fedumf.table-a2"), chosen).configurations.items()
        }

    assert planned() == {"MNIST unbalanced 15% (SCAFFOLD)": 12, "MNIST unbalanced 15%": None}
    assert planned(samples=14_000) == {
        "MNIST unbalanced 15% (SCAFFOLD)": 3,
        "MNIST unbalanced 15%": None,
    }


def test_baselines_are_run_too() -> None:
    options = ReproduceOptions(
        rows=("Ditto+ALA",), columns=("CIFAR-100 Dir(0.1) improvement",), seeds=(0,)
    )
    planned = plan(exhibit("fedala.table-4"), options)
    assert [parse(job.name.algorithm).name for job in planned.jobs] == ["ditto", "ala_code"]
    options = ReproduceOptions(
        rows=("SCAFFOLD",), columns=("MNIST unbalanced 15% to 95% speed-up",)
    )
    planned = plan(exhibit("fedumf.table-a2"), options)
    assert [(job.name.setting, parse(job.name.algorithm).name) for job in planned.jobs] == [
        ("MNIST unbalanced 15%", "fedavg"),
        ("MNIST unbalanced 15% (SCAFFOLD)", "scaffold_feddc"),
    ]


_FAST = (("mnist", "cnn4"), ("ag_news", "fasttext"), ("tiny_imagenet", "resnet18"))


def test_changes_make_a_result_partial_unless_they_leave_the_numbers_alone() -> None:
    full = plan(
        exhibit("fedala.table-7"),
        ReproduceOptions(rows=("FedALA",), changes=("threads=1", "engine=rows")),
    )
    assert full.reasons == []
    assert len(full.jobs) == 10
    options = ReproduceOptions(
        rows=("FedALA",),
        columns=("MNIST",),
        seeds=(3,),
        rounds=5,
        samples=500,
        changes=("model=mlp",),
    )
    partial = plan(exhibit("fedala.table-7"), options)
    assert partial.reasons == [
        "5 of 2,000 rounds",
        "1 of 5 seeds",
        "500 samples of the data",
        "model=mlp",
    ]
    [settings] = partial.configurations.values()
    assert parse(settings.data.name).named == {"of": "mnist(normalise=half)", "samples": 500}
    assert (settings.model, settings.schedule.rounds, settings.seeds) == ("mlp", 5, [3])


def test_more_rounds_than_the_protocol_has_are_not_run() -> None:
    options = ReproduceOptions(columns=("MNIST IID 10% rate 0.01 to 92%",), rounds=10**6)
    [settings] = plan(exhibit("fedumf.table-1"), options).configurations.values()
    assert settings.schedule.rounds == 150


def test_rows_and_columns_are_whole_labels_words_or_parts() -> None:
    def rows(*texts: str, name: str = "fedumf.table-a2") -> set[str]:
        return {cell.row for cell in plan(exhibit(name), ReproduceOptions(rows=texts)).cells}

    assert rows("fedavg") == {"FedAvg"}
    assert rows("FedAvg, FedDC", "scaffold") == {"FedAvg", "FedDC", "SCAFFOLD"}
    assert rows("umf") == {"FedUmf+FedDC"}
    assert rows("FedAvg", name="fedala.table-2") == {"FedAvg"}
    options = ReproduceOptions(columns=("synthetic (0,1) 15%",))
    assert {cell.column for cell in plan(exhibit("fedumf.figure-a5"), options).cells} == {
        "synthetic (0,1) 15%"
    }
    options = ReproduceOptions(columns=("non-IID 15%,EMNIST-L IID",))
    assert len({cell.column for cell in plan(exhibit("fedumf.table-a2"), options).cells}) == 2 * (
        4 + 2
    )  # including the speed-ups
    with pytest.raises(InvalidValue, match="no row has 'zzz' in its name"):
        rows("FedAvg,zzz")


# measures
# -----------------------------------------------------------------------------------------------------------------


def _run(records: list[dict[str, Any]], seed: int = 0, **fields: Any) -> RunSummary:
    return RunSummary(
        "fedavg",
        seed,
        [{"round": k, **record} for k, record in enumerate(records, start=1)],
        **fields,
    )


def _cell(measure: Measure, paper: Printed | None = None) -> PaperCell:
    return PaperCell("FedAvg", appendix("mnist", "iid"), "fedavg", "somewhere", measure, paper)


def test_the_end_is_the_mean_of_the_last_ten_with_the_deviation_within_a_run() -> None:
    draw = np.random.default_rng(1)
    curves = draw.random((3, 14))
    runs = [
        _run([{"accuracy": float(value)} for value in curve], seed)
        for seed, curve in enumerate(curves)
    ]
    measurement = measured(_cell(Measure("end")), runs)
    assert measurement is not None
    assert measurement.mean == pytest.approx(100 * curves[:, 4:].mean())
    assert measurement.std == pytest.approx(
        100 * math.sqrt(np.mean(np.var(curves[:, 4:], axis=1, ddof=1)))
    )


def test_a_target_counts_as_reached_only_when_every_run_reached_it() -> None:
    quick = _run([{"accuracy": 0.2}, {"accuracy": 0.95}])
    slow = _run([{"accuracy": 0.2}, {"accuracy": 0.3}, {"accuracy": 0.949}], 1)
    cell = _cell(Measure("rounds", 95.0), Printed(40))
    assert measured(cell, [quick]) == Measured(2.0, None, 1, 1, 2, 95.0)
    both = measured(cell, [quick, slow])
    assert both == Measured(None, None, 2, 1, 3, 95.0)
    assert difference(both, cell.printed) is None
    assert measured(cell, []) is None


def test_an_interpolated_target_is_crossed_by_the_best_so_far_between_two_rounds() -> None:
    run = _run([{"accuracy": a} for a in (0.5, 0.9, 0.7)] + [{}, {"accuracy": 0.98}])
    measure = Measure("rounds", 96.0, interpolated=True)
    measurement = measured(_cell(measure), [run])
    # From 0.9 to 0.98 in round 5. The value 0.9 is the best so far, from the last evaluation in
    # round 3.
    assert measurement is not None
    assert measurement.mean == pytest.approx(3 + 2 * (0.96 - 0.9) / (0.98 - 0.9))
    early = measured(_cell(Measure("rounds", 40.0, interpolated=True)), [run])
    assert early is not None
    assert early.mean == pytest.approx(0.4 / 0.5)
    assert measured(_cell(Measure("rounds", 99.0, interpolated=True)), [run]) == Measured(
        None, None, 1, 0, 5, 98.0
    )


def test_speed_ups_and_improvements_compare_runs_of_the_same_seed() -> None:
    base = [
        _run([{"accuracy": a} for a in (0.1, 0.2, 0.9, 0.95)]),
        _run([{"accuracy": 0.9}] * 2, 1),
    ]
    quick = [_run([{"accuracy": 0.1}, {"accuracy": 0.9}], seed) for seed in (0, 1)]
    never = _run([{"accuracy": 0.1}], 1)
    cell = _cell(Measure("speedup", 90.0), Printed(3.64))
    measurement = measured(cell, quick, base)
    assert measurement is not None
    assert measurement.mean == pytest.approx((3 / 2 + 1 / 2) / 2)
    assert measurement.std == pytest.approx(statistics.stdev([3 / 2, 1 / 2]))
    assert measured(cell, [quick[0], never], base) == Measured(None, None, 2, 1, 2)
    assert measured(cell, quick, []) is None

    ala = [
        _run([{"personal_accuracy": a}, {"personal_accuracy": 0.1}], seed)
        for seed, a in enumerate((0.8, 0.7))
    ]
    without_ala = [_run([{"personal_accuracy": a}], seed) for seed, a in ((1, 0.4), (0, 0.3))]
    gain = measured(_cell(Measure("improvement")), ala, without_ala)
    assert gain is not None
    assert gain.mean == pytest.approx((50 + 30) / 2)


def test_differences_are_in_standard_deviations_of_paper_and_measurement() -> None:
    measurement = Measured(50.0, 3.0, 3, 3, 10)
    assert deviations(measurement, Printed(40.0, 4.0)) == pytest.approx(10 / 5)
    assert deviations(measurement, Printed(53.0)) == pytest.approx(-1.0)
    assert deviations(Measured(50.0, None, 1, 1, 10), Printed(40.0)) is None
    assert difference(measurement, Printed(None)) is None


def test_joining_clients_are_those_that_train_in_the_next_round() -> None:
    records = [{"clients": [0, 1]}, {"clients": [1, 2]}, {"clients": [0, 2]}]
    tables = [
        {"clients": [0, 1, 2], "samples": [10, 20, 30], "accuracy": [1.0, 0.5, 0.1]},
        {"clients": [0, 1, 2], "samples": [10, 20, 30], "accuracy": [0.9, 0.0, 0.2]},
        {"clients": [0, 1, 2], "samples": [10, 20, 30], "accuracy": [1.0, 1.0, 1.0]},
    ]
    lines = [{"round": k, "personal": table} for k, table in enumerate(tables, start=1)]
    measurement = measured(_cell(Measure("joining")), [_run(records, clients=lines)])
    assert measurement is not None
    after_first, after_second = (20 * 0.5 + 30 * 0.1) / 50, (10 * 0.9 + 30 * 0.2) / 40
    # no client trains after the last round
    assert measurement.mean == pytest.approx(100 * max(after_first, after_second))


def test_runs_are_judged_by_the_first_measure_that_is_an_accuracy() -> None:
    records = [
        {"accuracy": 0.9, "personal_accuracy": 0.8},
        *({"accuracy": 0.5, "personal_accuracy": 0.3},) * 10,
    ]
    run = _run([{"clients": [0], **record} for record in records])
    for kind, value in (("best", 0.9), ("end", 0.5), ("personal", 0.8)):
        measure = judged(
            [_cell(Measure("weights")), _cell(Measure(kind)), _cell(Measure("joining"))]
        )
        assert measure is not None
        assert measure.of(run) == pytest.approx(value)
    assert judged([_cell(Measure("rounds", 95.0))]) is None


def test_times_traffic_and_classes_are_read_from_runs() -> None:
    cell = _cell(Measure("models", a_client=True))
    size = 4 * 199_210
    records = [
        {"clients": [0, 1], "bytes_down": 2 * size, "bytes_up": 2 * size, "personal_accuracy": a}
        for a in (0.5, 0.4)
    ]
    timings = [
        {"round": k, "train_seconds": 60.0 * k, "server_seconds": 6.0, "seconds": 99.0}
        for k in (1, 2)
    ]
    settings = {"model": "feddc_fcn(hidden=200)", "data": {"name": "mnist"}}
    run = _run(
        records, timings=timings, configuration=settings, label_counts=[[1, 0, 5], [2, 2, 2]]
    )
    values = {
        kind: measured(_cell(Measure(kind)), [run], [run])
        for kind in ("minutes", "total", "slower", "classes", "models")
    }
    means = {kind: None if value is None else value.mean for kind, value in values.items()}
    assert means == pytest.approx({
        "minutes": statistics.median([66, 126]) / 60, "total": 1.1, "slower": 1.0, "classes": 2.5, "models": 4.0,
    })  # fmt: skip
    per_client = measured(cell, [run])
    assert per_client is not None
    assert per_client.mean == pytest.approx(2.0)


def test_learned_weights_of_ala_are_counted_as_in_the_paper() -> None:
    cells = [
        c
        for c in exhibit("fedala.table-6").cells
        if c.measure.kind == "weights" and "AG News" in c.column
    ]
    assert [difference(measured(cell, []), cell.printed) for cell in cells] == [0.0, 0.0, 0.0]
