"""Compare federations of tables with a simulation on the pooled rows; sites have separate CSV files
and no shared file.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable, Iterable
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from PIL import Image
from pyarrow import parquet
from torch import Tensor

import fedloom as fl
from fedloom.common.errors import CheckpointError, FedloomError, InvalidValue
from fedloom.data.columns import Columns
from fedloom.data.dataset import make_dataset
from fedloom.data.formats.arrow import as_arrow
from fedloom.data.table_rows import table_dataset
from fedloom.parts.accounting import ORDERS, epsilon
from fedloom.sites import server_app
from fedloom.sites.agreement import deployment
from fedloom.sites.messages import words_of
from fedloom.sites.site_columns import table_columns
from fedloom.sites.site_data import DataAgreement, own_data
from fedloom.state.tensors import read_tensors
from fedloom.survey.column_statistics import Statistics
from fedloom.survey.federated_statistics import statistics
from flower_support import LocalGrid, nodes, site
from forking_cli import main
from json_lines import json_lines

PAUSE = 0.01
SITES = 3
TRAINING = {"learning_rate": 0.1, "steps": 4, "batch_size": 16}


def patients(target: str) -> pd.DataFrame:
    """Return rows of three different hospitals, with numbers, text, integers and empty cells."""
    rng = np.random.default_rng(0)
    n = 330
    hospital = rng.choice(SITES, n, p=[0.5, 0.3, 0.2])
    rows = pd.DataFrame(
        {
            "age": rng.integers(18, 90, n) + 3 * hospital,
            "pressure": rng.normal(130, 15, n).round(1),
            "ward": rng.choice(["surgery", "medicine", "intensive care"], n, p=[0.5, 0.35, 0.15]),
            "hospital": hospital,
        }
    )
    # Only one site has this category.
    rows["ward"] = rows["ward"].where(
        (rows["ward"] != "intensive care") | (hospital == 0), "medicine"
    )
    rows.loc[rng.random(n) < 0.1, "pressure"] = np.nan
    severity = rows["age"] / 90 + rng.normal(0, 0.3, n)
    rows["cost"] = (4000 * severity).round(2)
    rows["outcome"] = np.where(severity > 0.8, "ill", "well")
    rows["grade"] = np.clip((3 * severity).astype(int), 0, 2) + 1
    return rows[["age", "pressure", "ward", "hospital", target]]


def configured(target: str, output: Path, options: str = "", **settings: Any) -> dict[str, Any]:
    text = f"""
algorithm = "fedavg"
rounds = 2
participation = 1.0
model = "mlp(hidden=[8])"
seed = 3
[data]
name = "table(target='{target}', missing='mean'{options})"
clients = {SITES}
[training]
learning_rate = 0.1
steps = 4
batch_size = 16
"""
    return {"configuration": text, "output": str(output), "smallest": 1, **settings}


def federated(config: dict[str, Any], rows: pd.DataFrame, folder: Path) -> LocalGrid:
    """Run a federation; each site has the rows of its hospital in a CSV file."""
    grid = LocalGrid(nodes(SITES, folder / "memory", smallest=1), config)
    for number in range(SITES):
        path = folder / f"{number}.csv"
        rows[rows["hospital"] == number].drop(columns="hospital").to_csv(path, index=False)
        site(grid, number).config["data"] = str(path)
    server_app.serve(grid, config, PAUSE)
    return grid


def simulated(rows: pd.DataFrame, test: pd.DataFrame, target: str) -> fl.Result:
    """Run the same federation on one machine."""
    table = {"path": rows, "test": test}
    hospital = rows["hospital"].to_numpy()
    partition = fl.Partition.of([np.flatnonzero(hospital == number) for number in range(SITES)])
    names = [name for name in rows if name not in ("hospital", target)]
    roles = Columns(target, inputs=names, missing="mean")
    dataset = table_dataset(
        "table", as_arrow(table["path"]), as_arrow(table["test"]), roles, "rows"
    )
    task = fl.make_task(
        dataset,
        partition=partition,
        clients=SITES,
        model="mlp(hidden=[8])",
        seed=3,
        training=TRAINING,
    )
    return fl.run(fl.FedAvg(), task, rounds=2, participation=1.0, seed=3)


def tensors(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / "model.safetensors")[0]


@pytest.mark.parametrize("target", ["outcome", "cost", "grade"])
def test_sites_with_files_of_their_own_train_the_model_of_the_pooled_rows(
    target: str, tmp_path: Path
) -> None:
    rows = patients(target)
    rows, test = rows[:300], rows[300:]
    test.to_csv(tmp_path / "test.csv", index=False)
    config = configured(
        target,
        tmp_path / "run",
        f", test_path='{tmp_path}/test.csv', inputs=['age', 'pressure', 'ward']",
    )
    federated(config, rows, tmp_path)
    expected = simulated(rows, test, target)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(tensors(tmp_path / "run")[name], tensor, rtol=1e-5, atol=1e-5)
    record = json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    figures = {
        name: value for name, value in expected.history[-1].items() if isinstance(value, float)
    }
    assert {name: record[name] for name in figures} == pytest.approx(figures, rel=1e-4)
    written = json.loads((tmp_path / "run" / "statistics.json").read_text())["columns"]
    assert written["age"]["mean"] == pytest.approx(rows["age"].mean())
    assert written["pressure"]["deviation"] == pytest.approx(rows["pressure"].std(ddof=0))
    assert written["ward"]["categories"] == dict(rows["ward"].value_counts())
    assert (tmp_path / "run" / "statistics.html").stat().st_size > 1000
    # The model predicts new rows with the categories and units of the sites.
    answers = fl.load(tmp_path / "run").predict(test.drop(columns=["hospital", target]))
    assert len(answers) == len(test)
    if target == "cost":
        assert abs(np.mean(answers) - rows["cost"].mean()) < 2 * rows["cost"].std()
    else:
        assert set(map(str, answers)) <= set(map(str, rows[target].unique()))


def test_without_any_file_at_the_server_sites_judge_the_model_by_rows_of_their_own(
    tmp_path: Path,
) -> None:
    config = configured("outcome", tmp_path / "run")
    config["configuration"] = config["configuration"].replace(
        "[data]", "personal_every = 1\nmetrics = ['auroc']\n[data]\nlocal_test = 0.25"
    )
    federated({**config, "largest_share": 0.4}, patients("outcome"), tmp_path)
    record = json_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0 <= record["client_accuracy"] <= 1
    clients = json_lines(tmp_path / "run" / "clients.jsonl")
    assert clients[-1]["client"]["clients"] == [0, 1, 2]
    # The card counts all training rows, and has the figures of the sites.
    card = (tmp_path / "run" / "model-card.md").read_text()
    sizes = patients("outcome")["hospital"].value_counts()
    kept = json.loads((tmp_path / "run" / "sites.json").read_text())
    assert 0.7 * sizes.sum() < kept["claimed"] < 0.8 * sizes.sum()
    assert max(kept["samples"]) < 0.75 * sizes.max() - 1, "a site is limited by largest_share"
    assert f"{kept['claimed']} samples to train on" in card
    for figure in ("loss", "auroc"):
        assert f"client_{figure}: {record[f'client_{figure}']:.4g}" in card


def test_a_run_goes_on_with_the_columns_of_its_beginning(tmp_path: Path) -> None:
    rows, config = patients("outcome"), configured("outcome", tmp_path / "run")
    federated(config, rows, tmp_path)
    preprocessing = json.loads((tmp_path / "run" / "sites.json").read_text())["preprocessing"]
    later = {**config, "configuration": config["configuration"].replace("rounds = 2", "rounds = 3")}
    rows["age"] += 1000  # the changed rows do not cause new statistics requests
    grid = federated(later, rows, tmp_path)
    assert not [m for m in grid.sent if m.metadata.message_type.endswith("statistics")]
    assert (
        json.loads((tmp_path / "run" / "sites.json").read_text())["preprocessing"] == preprocessing
    )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def changed(rows: pd.DataFrame, number: int, change: Any) -> list[pd.DataFrame]:
    """Return the rows of each site, with a change to one site."""
    tables = [rows[rows["hospital"] == k].drop(columns="hospital") for k in range(SITES)]
    tables[number] = change(tables[number])
    return tables


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: rows.rename(columns={"pressure": "presure"}), "'pressure' is numbers at "
                                                                    "0, 2 and missing at 1"),
        (lambda rows: rows.assign(pressure="high"), "'pressure' is numbers at 0, 2 and "
                                                    "categories at 1"),
        (lambda rows: rows.drop(columns="outcome"), "target: no column 'outcome'"),
        (lambda rows: rows.assign(outcome=None), "column 'outcome' is empty in row 0"),
    ],
)  # fmt: skip
def test_a_difference_is_told_by_column_before_the_first_round(
    change: Any, text: str, tmp_path: Path
) -> None:
    config = configured("outcome", tmp_path / "run")
    grid = LocalGrid(nodes(SITES, tmp_path, smallest=1), config)
    for number, rows in enumerate(changed(patients("outcome"), 1, change)):
        rows.to_csv(tmp_path / f"{number}.csv", index=False)
        site(grid, number).config["data"] = str(tmp_path / f"{number}.csv")
    with pytest.raises(InvalidValue) as error:
        server_app.serve(grid, config, PAUSE)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert not [m for m in grid.sent if m.metadata.message_type == "train"]


def test_a_site_does_not_tell_of_fewer_rows_than_its_owner_allows(tmp_path: Path) -> None:
    config = configured("outcome", tmp_path / "run")
    rows = patients("outcome")
    grid = LocalGrid(nodes(SITES, tmp_path / "memory", smallest=30), config)
    for number in range(SITES):
        rows[rows["hospital"] == number].drop(columns="hospital").to_csv(
            tmp_path / f"{number}.csv", index=False
        )
        site(grid, number).config["data"] = str(tmp_path / f"{number}.csv")
    server_app.serve(grid, config, PAUSE)
    categories = json.loads((tmp_path / "run" / "statistics.json").read_text())["columns"]["ward"][
        "categories"
    ]
    counts = [rows[rows["hospital"] == number]["ward"].value_counts() for number in range(SITES)]
    expected = {
        ward: sum(int(c[ward]) for c in counts if c.get(ward, 0) >= 30)
        for ward in rows["ward"].unique()
    }
    assert categories == {ward: count for ward, count in expected.items() if count}


def test_sites_read_columns_with_the_types_of_the_federation(tmp_path: Path) -> None:
    """Sites read columns with the federation's types, also codes that are numbers or NA."""
    codes = [["007", "A12", "1.50"], ["007", "008", "1.50"], ["1.50", "NA", "2"]]
    config = configured("outcome", tmp_path / "run", ", categorical=['code']")
    grid = LocalGrid(nodes(SITES, tmp_path / "memory", smallest=1), config)
    for number, names in enumerate(codes):
        rows = [f"{names[k % 3]},{('ill', 'well')[k % 2]}" for k in range(60)]
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join(["code,outcome", *rows, ""]))
        site(grid, number).config["data"] = str(path)
    server_app.serve(grid, config, PAUSE)
    preprocessing = fl.load(tmp_path / "run").preprocessing
    assert preprocessing.inputs.columns[0].categories == ("2", "007", "008", "1.50", "A12", "NA")
    for number, names in enumerate(codes):
        agreement = DataAgreement("table", preprocessing, "classification", 2, None)
        dataset = agreement.dataset(
            str(tmp_path / f"{number}.csv"), deployment(config).configuration
        )
        columns = dataset.train.inputs.sum(0).tolist()
        expected = [
            20 if name in names else 0 for name in preprocessing.inputs.columns[0].categories
        ]
        assert columns == expected


def test_pictures_in_folders_and_texts_in_files_are_read_as_the_federation_has_them(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    # Sites scale their pictures to the size in the federation.
    shapes = {"server": (8, 8), "site": (12, 10)}
    for folder, shape in shapes.items():
        for name in ("cat", "dog"):
            (tmp_path / folder / name).mkdir(parents=True)
            for k in range(6):
                pixels = rng.integers(0, 255, (*shape, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / folder / name / f"{k}.png")
    agreed = fl.make_task(
        f"images(folder='{tmp_path}/server')", clients=2, partition="iid", model="mlp"
    ).dataset.preprocessing
    train, test = own_data(str(tmp_path / "site"), agreed)
    assert train.inputs.shape == (12, 3, 8, 8)
    assert train.labels.tolist() == [0] * 6 + [1] * 6
    assert test is None
    np.savez(tmp_path / "all.npz", inputs=train.inputs.numpy(), labels=train.labels.numpy())
    reread, _ = own_data(str(tmp_path / "all.npz"), agreed)
    assert bool((reread.inputs == train.inputs).all())


def test_a_table_of_texts_has_the_tokens_of_the_servers_file(tmp_path: Path) -> None:
    words = {"sport": ["goal", "team"], "money": ["bank", "price"]}
    rng = np.random.default_rng(0)
    for name in ("server", *range(SITES)):
        topics = rng.choice(list(words), 40)
        texts = [" ".join(rng.choice([*words[topic], "the"], 5)) for topic in topics]
        pd.DataFrame({"text": texts, "topic": topics}).to_csv(tmp_path / f"{name}.csv", index=False)
    config = configured("topic", tmp_path / "run")
    text = (
        config["configuration"]
        .replace("table(", f"table(path='{tmp_path}/server.csv', ")
        .replace("mlp(hidden=[8])", "fasttext")
    )
    config["configuration"] = text
    grid = LocalGrid(nodes(SITES, tmp_path / "memory"), config)
    for number in range(SITES):
        site(grid, number).config["data"] = str(tmp_path / f"{number}.csv")
    server_app.serve(grid, config, PAUSE)
    assert not (tmp_path / "run" / "statistics.json").exists()
    answers = fl.load(tmp_path / "run").predict(
        pd.DataFrame({"text": ["goal team goal", "bank price bank"]})
    )
    assert len(answers) == 2
    config = configured("topic", tmp_path / "other")
    grid = LocalGrid(nodes(SITES, tmp_path / "memory"), config)
    for number in range(SITES):
        site(grid, number).config["data"] = str(tmp_path / f"{number}.csv")
    with pytest.raises(
        InvalidValue, match="texts and pictures in a table need an example at the server"
    ):
        server_app.serve(grid, config, PAUSE)


def read(folder: Path) -> Statistics:
    return Statistics.read(folder / "run" / "statistics.json")


def with_rows(grid: LocalGrid, rows: pd.DataFrame, folder: Path) -> LocalGrid:
    """Give each site the rows of its hospital in a CSV file."""
    for number, table in enumerate(changed(rows, 0, lambda table: table)):
        table.to_csv(folder / f"{number}.csv", index=False)
        site(grid, number).config["data"] = str(folder / f"{number}.csv")
    return grid


def test_statistics_alone_are_those_of_pandas_and_of_a_simulation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = patients("cost")
    config = configured("cost", tmp_path / "run", only="statistics", bins=16)
    grid = with_rows(
        LocalGrid(nodes(SITES, tmp_path / "memory", smallest=1), config), rows, tmp_path
    )
    with caplog.at_level("INFO", "flwr.fedloom"):
        assert server_app.serve(grid, config, PAUSE) is None
    assert not [m for m in grid.sent if m.metadata.message_type == "train"]
    assert sorted(path.name for path in (tmp_path / "run").glob("[!.]*")) == [
        "statistics.html",
        "statistics.json",
    ]
    published = read(tmp_path)
    for name in ("age", "pressure", "cost"):
        column = published.columns[name]
        assert (column.count, column.empty) == (rows[name].count(), rows[name].isna().sum())
        exact = 1e-6 if name == "cost" else 1e-12  # the target is in float32
        assert column.mean == pytest.approx(rows[name].mean(), rel=exact)
        assert column.deviation == pytest.approx(rows[name].std(ddof=0), rel=1000 * exact)
        expected, _ = np.histogram(rows[name].dropna().clip(*column.edges), 16, column.edges)
        np.testing.assert_array_equal(column.bins, expected)
    assert published.columns["ward"].categories == dict(rows["ward"].value_counts())
    # Compare with one machine.
    hospital, plain = rows["hospital"].to_numpy(), rows.drop(columns="hospital")
    partition = fl.Partition.of([np.flatnonzero(hospital == number) for number in range(SITES)])
    roles = Columns("cost", missing="mean")
    dataset = table_dataset("table", as_arrow(plain), as_arrow(plain[:1]), roles, "rows")
    task = fl.make_task(dataset, partition=partition, clients=SITES, model="mlp(hidden=[8])")
    simulated = statistics(task, smallest=1, bins=16)
    assert list(published.columns) == list(simulated.columns)
    assert repr(published.columns) == repr(simulated.columns)
    assert "| pressure |" in caplog.text
    assert "3 clients" in caplog.text


def test_statistics_of_arrays_and_of_shares_of_a_data_set(tmp_path: Path) -> None:
    text = (
        'algorithm = "fedavg"\nrounds = 1\nmodel = "logistic"\n[data]\nname = '
        '"wine"\nclients = 3\npartition = "iid"\n'
    )
    config: dict[str, Any] = {
        "configuration": text,
        "output": str(tmp_path / "run"),
        "only": "statistics",
        "smallest": 1,
    }
    grid = LocalGrid(nodes(SITES, tmp_path / "memory", smallest=1), config)
    server_app.serve(grid, config, PAUSE)
    task = deployment(config).configuration.task(0)
    published, expected = read(tmp_path), statistics(task, smallest=1)
    assert repr(published.columns) == repr(expected.columns)
    # Write the same samples to files of the sites.
    for number in range(SITES):
        index = torch.from_numpy(task.partition[number])
        samples = task.dataset.train[index]
        np.savez(
            tmp_path / f"{number}.npz", inputs=samples.inputs.numpy(), labels=samples.labels.numpy()
        )
        site(grid, number).config["data"] = str(tmp_path / f"{number}.npz")
    server_app.serve(grid, config, PAUSE)
    assert repr(read(tmp_path)) == repr(published)


BOUNDS = "age=0,120; pressure=50,250"


def test_noise_of_statistics_is_drawn_by_sites_and_counted_in_the_budget_of_the_run(
    tmp_path: Path,
) -> None:
    config = configured("outcome", tmp_path / "run", epsilon=2.0, bounds=BOUNDS)
    config["configuration"] = config["configuration"].replace(
        '"fedavg"', '"dp_sgd(fedavg, noise=1.0, delta=1e-4)"'
    )
    rows = patients("outcome")
    grid = with_rows(
        LocalGrid(nodes(SITES, tmp_path / "memory", smallest=1), config), rows, tmp_path
    )
    statistics_alone = {**config, "only": "statistics"}
    server_app.serve(grid, statistics_alone, PAUSE)
    published = read(tmp_path)
    assert published.releases == 2 * 4 + 2
    (line,) = json_lines(tmp_path / "run" / "released.jsonl")
    assert (line["round"], line["method"], line["clients"]) == (0, "statistics", None)
    assert line["noise"] == pytest.approx(published.noise / published.releases**0.5)
    assert epsilon(line["noise"], 1.0, 1, published.survey.delta / 2) == pytest.approx(
        2.0, rel=1e-2
    )
    # A new start of the statistics and the run reuse them, because new noise would cost the same
    # again.
    requests = [m for m in grid.sent if m.metadata.message_type.endswith("statistics")]
    server_app.serve(grid, statistics_alone, PAUSE)
    server_app.serve(grid, config, PAUSE)
    assert [m for m in grid.sent if m.metadata.message_type.endswith("statistics")] == requests
    assert repr(read(tmp_path)) == repr(published)
    agreed = json.loads((tmp_path / "run" / "preprocessing.json").read_text())["inputs"]["columns"]
    assert agreed[0]["mean"] == [published.columns["age"].mean]
    # The epsilon of the run includes its steps and the statistics.
    records = json_lines(tmp_path / "run" / "metrics.jsonl")
    smallest = min(int((rows["hospital"] == number).sum()) for number in range(SITES))
    for record in records:
        steps = 4 * record["round"]
        expected = composed(line["noise"], 16 / smallest, steps, 1e-4)
        assert record["epsilon"] == pytest.approx(expected, rel=1e-6)
        assert record["epsilon"] > epsilon(1.0, 16 / smallest, steps, 1e-4)
    # The folder holds the run, and a statistics run would need another folder.
    with pytest.raises(
        InvalidValue, match="contains a run that has its own statistics: choose another output"
    ):
        server_app.serve(grid, statistics_alone, PAUSE)
    ledger = tmp_path / "run" / "released.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[1:]))
    longer = {
        **config,
        "configuration": config["configuration"].replace("rounds = 2", "rounds = 3"),
    }
    with pytest.raises(
        CheckpointError, match="is damaged in line 1, or belongs to another run: the spent privacy"
    ):
        server_app.serve(grid, longer, PAUSE)


def composed(noise: float, share: float, steps: int, delta: float) -> float:
    """Return epsilon of one release to all rows and of steps on random samples, from the accountant
    of dp_accounting.
    """
    dp_accounting = pytest.importorskip("dp_accounting")
    accountant = pytest.importorskip("dp_accounting.rdp").RdpAccountant(ORDERS)
    accountant.compose(dp_accounting.GaussianDpEvent(noise))
    accountant.compose(
        dp_accounting.PoissonSampledDpEvent(share, dp_accounting.GaussianDpEvent(1.0)), steps
    )
    return float(accountant.get_epsilon(delta))


def test_noisy_statistics_whose_ledger_is_gone_are_refused(tmp_path: Path) -> None:
    config = configured("outcome", tmp_path / "run", epsilon=2.0, bounds=BOUNDS, only="statistics")
    grid = with_rows(
        LocalGrid(nodes(SITES, tmp_path / "memory"), config), patients("outcome"), tmp_path
    )
    server_app.serve(grid, config, PAUSE)
    (tmp_path / "run" / "released.jsonl").unlink()
    with pytest.raises(
        CheckpointError, match=r"released\.jsonl has no entry for the cost of .*statistics\.json"
    ):
        server_app.serve(grid, config, PAUSE)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"epsilon": 1.0, "bounds": "age=0,120"}, "epsilon needs bounds for column 'pressure'"),
        (
            {"bounds": "age=0"},
            "run configuration: bounds 'age=0' is not COLUMN=LOW,HIGH, such as age=0,120",
        ),
        ({"bounds": "aeg=0,1"}, "bounds: 'aeg' is no column of numbers: did you mean 'age'?"),
        ({"only": "statistic"}, "run configuration: only must be"),
        ({"delta": 2.0}, "delta must be"),
        ({"bins": 0}, "bins must be at least 1, not 0"),
    ],
)
def test_bad_settings_of_statistics_are_one_line(
    settings: dict[str, Any], text: str, tmp_path: Path
) -> None:
    config = configured("outcome", tmp_path / "run", **{"only": "statistics", **settings})
    grid = with_rows(
        LocalGrid(nodes(SITES, tmp_path / "memory"), config), patients("outcome"), tmp_path
    )
    with pytest.raises(FedloomError) as error:
        server_app.serve(grid, config, PAUSE)
    assert text in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "released.jsonl").exists()


def test_columns_of_lists_are_told_by_name(tmp_path: Path) -> None:
    config = configured("outcome", tmp_path / "run")
    grid = LocalGrid(nodes(SITES, tmp_path / "memory"), config)
    for number in range(SITES):
        path = tmp_path / f"{number}.parquet"
        pd.DataFrame(
            {"signal": [[1.0, 2.0], [3.0, 4.0]] * 6, "outcome": ["ill", "well"] * 6}
        ).to_parquet(path)
        site(grid, number).config["data"] = str(path)
    with pytest.raises(InvalidValue) as error:
        server_app.serve(grid, config, PAUSE)
    assert "column 'signal' of " in str(error.value)
    assert "contains lists: make a column of each number, or let all sites bring arrays" in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_the_command_asks_the_sites_of_an_app(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda words: called.append(words) or 3)
    assert (
        main(
            [
                "statistics",
                str(tmp_path),
                "--epsilon",
                "1",
                "--bounds",
                "age=0,120",
                "--bounds",
                "dose=0,20",
            ]
        )
        == 3
    )
    (words,) = called
    assert words[1:4] == ["run", str(tmp_path), "--stream"]
    assert words[5] == 'epsilon=1.0 bounds="age=0,120; dose=0,20" only="statistics"'
    assert main(["statistics", str(tmp_path), "--output", "page.html"]) == 2


@pytest.mark.parametrize("step", ["kinds", "squares"])
def test_a_site_that_is_lost_during_statistics_is_absent_and_the_run_goes_on(
    step: str, tmp_path: Path
) -> None:
    class Lost(LocalGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            sent = list(messages)
            for message in sent:
                if message.metadata.message_type == "query.statistics":
                    words = words_of(message)
                    site(self, 1).online &= words["step"] != step
            return super().push_messages(sent)

    rows = patients("outcome")
    config = configured("outcome", tmp_path / "run", wait=1)
    grid = Lost(nodes(SITES, tmp_path / "memory", smallest=1), config)
    for number in range(SITES):
        path = tmp_path / f"{number}.csv"
        rows[rows["hospital"] == number].drop(columns="hospital").to_csv(path, index=False)
        site(grid, number).config["data"] = str(path)
    server_app.serve(grid, config, PAUSE)
    records = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 2
    (fault,) = records[0]["faults"]
    assert fault["client"] == 1
    assert fault["reason"] == "lost before round 1: the site has disconnected"
    left = rows[rows["hospital"] != 1]["age"]
    age = json.loads((tmp_path / "run" / "statistics.json").read_text())["columns"]["age"]
    mean = left.mean() if step == "kinds" else rows["age"].mean()  # it answered the sums
    assert age["mean"] == pytest.approx(mean)
    assert age["deviation"] == pytest.approx(np.sqrt(((left - mean) ** 2).mean()))


TYPES = {
    "date": pa.array([date(2020, 1, day) for day in range(1, 25)]),
    "moment": pa.array([datetime(2020, 1, day) for day in range(1, 25)]),
    "time": pa.array([time(day - 1) for day in range(1, 25)]),
    "bytes": pa.array([b"x"] * 24),
    "decimal": pa.array([Decimal(k) for k in range(24)]),
    "boolean": pa.array([k % 2 == 0 for k in range(24)]),
    "category": pa.array(["a", "b"] * 12).dictionary_encode(),
    "text": pa.array(["a", "b"] * 12),
}


@pytest.mark.parametrize("kind", TYPES)
def test_sites_and_simulations_accept_the_same_types_of_columns(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    outcome = pa.array(["ill", "well", "well"] * 8)
    parquet.write_table(pa.table({"value": TYPES[kind], "outcome": outcome}), path)

    def outcome_of(read: Callable[[], object]) -> str:
        try:
            read()
        except FedloomError as error:
            return str(error)
        return "accepted"

    plan = deployment(configured("outcome", tmp_path / "run")).configuration
    at_site = outcome_of(lambda: table_columns(plan, 0, str(path)))
    simulated = outcome_of(lambda: make_dataset(f"table(path='{path}', target='outcome')"))
    assert at_site == simulated
    accepted = ("decimal", "boolean", "category", "text")
    assert (at_site == "accepted") == (kind in accepted), at_site
    assert "\n" not in at_site


def test_an_error_of_the_start_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("flwr")
    log.addHandler(caplog.handler)
    grid = LocalGrid({}, {})
    try:
        with pytest.raises(InvalidValue) as caught:
            server_app.main(grid, Context(1, 1, {}, RecordDict(), {"output": "x"}))
        log.error("ServerApp raised an exception", exc_info=caught.value)
        assert log.isEnabledFor(logging.ERROR)
        log.error("other", exc_info=ValueError("broken"))
    finally:
        log.removeHandler(caplog.handler)
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "run configuration: configuration is missing" in texts
    assert "ServerApp raised an exception" not in texts
    assert "other" in texts
