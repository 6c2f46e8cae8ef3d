"""`fedloom paper reproduce`: small runs of one cell per paper.

Tests output, errors, estimates and data.

The runs have one or two rounds on a few generated images in the file formats of the original data
sets. Each output must contain PARTIAL.
"""

from __future__ import annotations

import csv
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.common.errors import InvalidValue
from fedloom.common.expression import parse
from fedloom.data.dataset import make_dataset
from fedloom.reviews.papers.estimate import cost, estimate, work
from fedloom.reviews.papers.exhibit_record import ExhibitRecord
from fedloom.reviews.papers.library import exhibit, exhibits, paper, titles
from fedloom.reviews.papers.paper_data import FACTS, at_hand
from fedloom.reviews.papers.plan import ReproduceOptions, plan
from forking_cli import Say, saying
from papers_support import numbers_of
from report_support import ablations_drawn


def idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    """Write unsigned bytes in the file format of MNIST."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a small MNIST (idx files) and CIFAR-10 (pickled batches).

    Each class is a grey level with noise.
    """
    root = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    mnist, cifar = root / "MNIST" / "raw", root / "cifar-10-batches-py"
    mnist.mkdir(parents=True)
    cifar.mkdir()
    for split, count in (("train", 900), ("t10k", 100)):
        labels = np.arange(count) % 10
        idx(
            mnist / f"{split}-images-idx3-ubyte",
            20 * labels[:, None, None] + draw.integers(0, 40, (count, 28, 28)),
        )
        idx(mnist / f"{split}-labels-idx1-ubyte", labels)
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        labels = np.arange(40) % 10
        pixels = 20 * labels[:, None] + draw.integers(0, 40, (40, 3072))
        (cifar / name).write_bytes(
            pickle.dumps({b"data": pixels.astype(np.uint8), b"labels": labels.tolist()}, 2)
        )
    return root


@pytest.fixture
def reproduce(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Say:
    """Return a function that runs `paper reproduce` with the generated data.

    For example, `reproduce("fedumf.table-a2", ...)` returns (exit code, stdout, stderr).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FEDLOOM_DATA", str(data))
    # no processes for these short runs
    monkeypatch.setattr("fedloom.study.cores.usable_cores", lambda: 1)
    return partial(saying(capsys), "paper", "reproduce")


# one cell of each paper
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row", "column", "rounds"),
    [
        ("fedmr.table-1", "FedMR", "CNN CIFAR-10 IID", 2),
        ("fedmr-kdd.table-1", "FedMut", "CNN CIFAR-10 IID", 2),
        ("fedmr-first.table-1", "FedAvg", "CNN CIFAR-10 IID", 2),
        ("fedumf.table-a2", "FedUmf+FedDC", "MNIST IID 15% to 95%", 2),
        ("fedala.table-2", "FedALA", "MNIST pathological", 1),
    ],
)
def test_a_shortened_cell_of_each_paper_is_marked_partial_everywhere(
    reproduce: Say, tmp_path: Path, name: str, row: str, column: str, rounds: int
) -> None:
    arguments = [
        name,
        "--rows",
        row,
        "--columns",
        column,
        "--rounds",
        str(rounds),
        "--seeds",
        "0",
        "-q",
        "threads=1",
    ]
    code, out, err = reproduce(*arguments)
    assert code == 0, err
    [number] = (
        [n for n in numbers_of(name) if n["method"] == row and _is(n, column)]
        if "first" not in name
        else [{}]
    )
    folder = tmp_path / "runs" / "reproduce" / name
    line = next(line for line in out.splitlines() if line.strip().startswith(row))
    assert line.rstrip().endswith("PARTIAL")
    if number:
        shown = number["rounds"] if "rounds" in number else number["mean"]
        assert f"{shown:g}" in line
    assert out.startswith(f"PARTIAL {name}")
    assert f"PARTIAL: {rounds} of" in out

    [cell] = csv.DictReader((folder / "cells.csv").read_text().splitlines())
    assert cell["status"] == "PARTIAL"
    assert f"{rounds} of" in cell["left_out"]
    assert (cell["row"], cell["runs"], cell["rounds"]) == (row, "1", str(rounds))
    assert "PARTIAL " + name in (folder / "report.html").read_text()
    record = ExhibitRecord.read(folder / "cells.json")
    [result] = record.results
    assert (result.cell.row, result.cell.column) == (row, cell["column"])
    assert result.result is not None
    assert (str(result.result.runs), "; ".join(result.left_out)) == (cell["runs"], cell["left_out"])
    assert ("" if result.result.mean is None else str(result.result.mean)) == cell["here"].replace(
        "*", ""
    )
    assert record.command.startswith(f"fedloom paper reproduce {name} --rows ")
    assert record.environment["threads"] == 1

    times = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("result.json"))
    code, repeated, err = reproduce(*arguments)
    assert code == 0
    assert "all finished before" in err
    assert repeated == out
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("result.json")) == times


def _is(number: Mapping[str, Any], column: str) -> bool:
    """Return True if a printed number is in the named column."""
    columns = {
        "CNN CIFAR-10 IID": ("cnn", "cifar10", "iid"),
        "MNIST IID 15% to 95%": ("feddc_fcn", "mnist", "iid"),
    }
    column_settings = columns.get(column, ("cnn4", "mnist", "pathological:2"))
    share = number["participation"] in (0.1, 0.15, 1.0)
    return (
        number["model"],
        number["dataset"],
        number["heterogeneity"],
    ) == column_settings and share


@pytest.mark.parametrize(
    ("name", "row", "column", "printed"),
    [
        ("mcmahan.table-1-2nn", "FedAvg", "2NN non-IID C=0 E=1 B=inf", "4278"),
        ("mcmahan.table-2", "FedSGD", "CNN IID C=0.1 E=1 B=inf", "626"),
        ("niid-bench.table-mnist", "SCAFFOLD", "MNIST 2 labels", "96.92 ± 0.52"),
        ("fedbench.table-mnist", "FedAdagrad", "2 labels", "95.92 ± 0.37"),
    ],
)
def test_cells_of_baseline_papers_run(
    reproduce: Say, name: str, row: str, column: str, printed: str
) -> None:
    small = ("--rounds", "1", "--seeds", "0", "-q", "threads=1", "training.epochs=1")
    code, out, err = reproduce(name, "--rows", row, "--columns", column, *small)
    assert code == 0, err
    line = next(line for line in out.splitlines() if line.strip().startswith(row))
    assert printed in line
    assert line.rstrip().endswith("PARTIAL")


def test_papers_share_runs_of_equal_length(reproduce: Say, tmp_path: Path) -> None:
    cell = ("--rows", "FedAvg", "--columns", "CNN CIFAR-10 IID", "-q", "threads=1")
    assert reproduce("fedmr.table-1", *cell, "--rounds", "1")[0] == 0
    _, _, err = reproduce("fedmr-kdd.table-1", *cell, "--rounds", "1")
    assert "all finished before" in err
    assert reproduce("fedmr-kdd.table-1", *cell, "--rounds", "2")[0] == 0
    assert sorted(len(p.read_text().splitlines()) for p in tmp_path.rglob("metrics.jsonl")) == [
        1,
        2,
    ]


def test_an_estimate_alone_runs_nothing(reproduce: Say, tmp_path: Path) -> None:
    code, out, err = reproduce(
        "fedumf.table-a2", "--rows", "FedAvg", "--columns", "MNIST IID 15%", "--estimate"
    )
    assert code == 0
    assert out == ""
    assert "1 cells, 1 run, 54,000 local steps: about" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("fedmr", 4),
        ("fedumf", 36),
        ("fedala", 4),
        ("mcmahan", 12),
        ("niid-bench", 4),
        ("fedbench", 8),
    ],
)
def test_each_paper_has_a_selection_that_takes_an_hour(
    name: str, runs: int, reproduce: Say, tmp_path: Path
) -> None:
    selection = paper(name).hour
    options = ReproduceOptions(directory=tmp_path, **selection.limits)
    planned = plan(exhibits()[selection.exhibit], options)
    assert len(planned.jobs) == runs
    # Assume 5 ms per step with convolutions, 0.5 ms per step of a multilayer perceptron, and two
    # cores.
    steps = sum(run.steps for runs in estimate(planned, 1).values() for run in runs)
    assert 0.2 * 3600 < steps * (0.0005 if name in ("fedumf", "mcmahan") else 0.005) / 2 < 3600


def test_the_scope_of_an_hour_is_printed_first(reproduce: Say) -> None:
    code, out, err = reproduce(
        "fedumf", "--hour", "--rows", "FedAvg", "--columns", "MNIST IID 15% to 95%", "--estimate"
    )
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0].startswith("shows all of the table's MNIST cells")
    assert lines[1].startswith("does not show EMNIST-L")
    assert "1 run, 54,000 local steps" in err


def test_the_page_of_a_figure_begins_with_it_and_holds_every_setting(
    reproduce: Say, tmp_path: Path
) -> None:
    small = (
        "--columns",
        "MNIST,CIFAR-10",
        "-q",
        "threads=1",
        "data.clients=3",
        "training.batch_size=50",
    )
    code, out, err = reproduce("fedala.figure-7", *small)
    assert code == 0, err
    assert sum(line.rstrip().endswith("PARTIAL") for line in out.splitlines()) == 2
    page = (tmp_path / "runs" / "reproduce" / "fedala.figure-7" / "report.html").read_text()
    assert page.split("<h2>")[1].startswith("The clients and their data")
    for name in ("MNIST pathological", "CIFAR-10 pathological"):
        assert f'data-choice="labels" data-value="labels, {name}' in page


def test_figures_of_what_differs_show_the_measure_of_the_cells(
    reproduce: Say, tmp_path: Path
) -> None:
    small = (
        "--rows",
        "FedAvg",
        "--rounds",
        "3",
        "-q",
        "threads=1",
        "training.batch_size=50",
        "training.epochs=1",
    )
    code, _, err = reproduce("fedumf.figure-3", *small)
    assert code == 0, err
    folder = tmp_path / "runs" / "reproduce" / "fedumf.figure-3"
    cells = {
        cell["column"]: float(cell["here"])
        for cell in csv.DictReader((folder / "cells.csv").read_text().splitlines())
    }
    (figure,) = ablations_drawn((folder / "report.html").read_text())
    assert figure["layout"]["yaxis"]["title"]["text"] == "Best accuracy of any<br>evaluation"
    assert [100 * y for y in figure["data"][0]["y"]] == pytest.approx(
        [cells["MNIST IID 10% rate 0.01"], cells["MNIST IID 50% rate 0.01"]]
    )


# lists and errors
# ---------------------------------------------------------------------------------------------------------


def test_the_list_names_every_table_and_figure_with_its_data(reproduce: Say) -> None:
    code, out, _ = reproduce()
    assert code == 0
    for name, entry in exhibits().items():
        line = next(line for line in out.splitlines() if line.split()[:1] == [name])
        assert f" {len(entry.cells)} " in line
    assert "(Tiny-ImageNet)" in out
    assert "(MNIST)" not in out
    assert {name.partition(".")[0] for name in exhibits()} == set(titles())


# estimates and data
# ----------------------------------------------------------------------------------------------------------


def test_steps_are_counted_as_the_protocol_has_them() -> None:
    def steps(name: str, row: str, column: str) -> int:
        planned = plan(exhibit(name), ReproduceOptions(rows=(row,), columns=(column,)))
        [settings] = planned.configurations.values()
        data_facts = FACTS[parse(settings.data.name).name]
        return cost(settings, planned.jobs[0].name.algorithm, data_facts, 0.1).steps

    assert steps("fedumf.table-a2", "FedAvg", "MNIST IID 15% to 95%") == 300 * 15 * 12
    assert steps("fedmr.table-1", "FedAvg", "CNN CIFAR-10 IID") == 1000 * 10 * 5 * 10
    # the last, incomplete batch is dropped
    assert steps("fedala.table-7", "FedAvg", "MNIST Dir(0.1)") == 2000 * 20 * 262
    assert work(parse("umf(fedavg, alpha=1)"), 0.25) == pytest.approx(1.75)
    assert work(parse("fedavg_c(finetune_epochs=10)"), 1.0) == 11.0
    assert work(parse("fedprox_c(finetune_epochs=0, mu=0.001)"), 1.0) == 1.0
    assert work(parse("stages(fedavg:100, fedasam)"), 0.1) == 2.0


def test_data_are_found_where_the_loader_looks(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    assert at_hand("mnist", str(data))
    assert at_hand("mnist", str(data / "MNIST"))
    assert not at_hand("emnist_l", str(data))
    assert at_hand("synthetic_feddc")
    monkeypatch.setenv("FEDLOOM_DATA", str(data))
    assert at_hand("cifar10")


def test_recorded_facts_of_data_sets_are_right(data: Path) -> None:
    for name in ("mnist", "cifar10"):
        assert make_dataset(f"{name}(folder='{data}')").spec == FACTS[name].spec
    generated = make_dataset("synthetic_feddc(test=train)")
    expected = FACTS["synthetic_feddc"]
    assert (generated.spec, len(generated.train), len(generated.test)) == (
        expected.spec,
        expected.train,
        expected.test,
    )


def test_a_part_holds_a_sample_and_keeps_name_mean_and_shape(data: Path) -> None:
    full = make_dataset(f"mnist(folder='{data}')")
    sample = make_dataset(f"part(of=\"mnist(folder='{data}')\", samples=200)")
    assert (len(sample.train), len(sample.test)) == (180, 20)
    assert (sample.mean, sample.name, sample.spec) == (full.mean, "mnist", full.spec)
    rows = {row.numpy().tobytes() for row in full.train.inputs}
    sampled_rows = [row.numpy().tobytes() for row in sample.train.inputs]
    assert len(set(sampled_rows)) == len(sampled_rows)
    assert set(sampled_rows) <= rows
    assert torch.equal(
        sample.train.labels,
        make_dataset(f"part(of=\"mnist(folder='{data}')\", samples=200)").train.labels,
    )
    assert len(make_dataset(f"part(of=\"mnist(folder='{data}')\", samples=5000)").train) == 900
    with pytest.raises(InvalidValue, match="samples must be at least 2, not 1"):
        make_dataset("part(of=digits, samples=1)")
