"""Federations of tables: sites with CSV files of their own, without a shared file, against a simulation on the pooled rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor

import fedloom as fl
from fedloom.errors import InvalidValue
from fedloom.sites import server_app
from fedloom.sites.site_data import own_data
from fedloom.state.tensors import read_tensors
from flower_support import LocalGrid, nodes, site

PAUSE = 0.01
SITES = 3
TRAINING = {"learning_rate": 0.1, "steps": 4, "batch_size": 16}


def patients(target: str) -> pd.DataFrame:
    """Return rows of three hospitals that differ, with numbers, text, whole numbers and empty cells."""
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
    # A category that one site alone has.
    rows["ward"] = rows["ward"].where((rows["ward"] != "intensive care") | (hospital == 0), "medicine")
    rows.loc[rng.random(n) < 0.1, "pressure"] = np.nan
    severity = rows["age"] / 90 + rng.normal(0, 0.3, n)
    rows["cost"] = (4000 * severity).round(2)
    rows["outcome"] = np.where(severity > 0.8, "ill", "well")
    rows["grade"] = np.clip((3 * severity).astype(int), 0, 2) + 1
    return rows[["age", "pressure", "ward", "hospital", target]]


def configured(target: str, output: Path, options: str = "", **more: Any) -> dict[str, Any]:
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
    return {"configuration": text, "output": str(output), "smallest": 1, **more}


def federated(config: dict[str, Any], rows: pd.DataFrame, folder: Path) -> LocalGrid:
    """Run a federation whose sites have these rows, by hospital, in CSV files."""
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
    from fedloom.data.columns import Columns
    from fedloom.data.preprocessing import as_arrow
    from fedloom.data.sets.table import table_dataset

    roles = Columns(target, inputs=names, missing="mean")
    dataset = table_dataset("table", as_arrow(table["path"]), as_arrow(table["test"]), roles, "rows")
    task = fl.make_task(dataset, partition=partition, clients=SITES, model="mlp(hidden=[8])", seed=3, training=TRAINING)
    return fl.run(fl.FedAvg(), task, rounds=2, participation=1.0, seed=3)


def tensors(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder / "model.safetensors")[0]


@pytest.mark.parametrize("target", ["outcome", "cost", "grade"])
def test_sites_with_files_of_their_own_train_the_model_of_the_pooled_rows(target: str, tmp_path: Path) -> None:
    rows = patients(target)
    rows, test = rows[:300], rows[300:]
    test.to_csv(tmp_path / "test.csv", index=False)
    config = configured(
        target, tmp_path / "run", f", test_path='{tmp_path}/test.csv', inputs=['age', 'pressure', 'ward']"
    )
    federated(config, rows, tmp_path)
    expected = simulated(rows, test, target)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(tensors(tmp_path / "run")[name], tensor, rtol=1e-5, atol=1e-5)
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    figures = {name: value for name, value in expected.history[-1].items() if isinstance(value, float)}
    assert {name: last[name] for name in figures} == pytest.approx(figures, rel=1e-4)
    statistics = json.loads((tmp_path / "run" / "statistics.json").read_text())["columns"]
    assert statistics["age"]["mean"] == pytest.approx(rows["age"].mean())
    assert statistics["pressure"]["deviation"] == pytest.approx(rows["pressure"].std(ddof=0))
    assert statistics["ward"]["categories"] == dict(rows["ward"].value_counts())
    assert (tmp_path / "run" / "statistics.html").stat().st_size > 1000
    # The model scores new rows in the words and units of the sites.
    answers = fl.load(tmp_path / "run").predict(test.drop(columns=["hospital", target]))
    assert len(answers) == len(test)
    if target == "cost":
        assert abs(np.mean(answers) - rows["cost"].mean()) < 2 * rows["cost"].std()
    else:
        assert set(map(str, answers)) <= set(map(str, rows[target].unique()))


def test_without_any_file_at_the_server_sites_judge_the_model_by_rows_of_their_own(tmp_path: Path) -> None:
    config = configured("outcome", tmp_path / "run")
    config["configuration"] = config["configuration"].replace("[data]", "personal_every = 1\n[data]\nlocal_test = 0.25")
    federated(config, patients("outcome"), tmp_path)
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert 0 <= last["client_accuracy"] <= 1
    clients = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert clients[-1]["client"]["clients"] == [0, 1, 2]


def test_a_run_goes_on_with_the_columns_of_its_beginning(tmp_path: Path) -> None:
    rows, config = patients("outcome"), configured("outcome", tmp_path / "run")
    federated(config, rows, tmp_path)
    asked = json.loads((tmp_path / "run" / "sites.json").read_text())["preprocessing"]
    later = {**config, "configuration": config["configuration"].replace("rounds = 2", "rounds = 3")}
    rows["age"] += 1000  # the rows at the sites are others now: nobody asks for statistics again
    grid = federated(later, rows, tmp_path)
    assert not [m for m in grid.sent if m.metadata.message_type.endswith("statistics")]
    assert json.loads((tmp_path / "run" / "sites.json").read_text())["preprocessing"] == asked
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


def changed(rows: pd.DataFrame, number: int, change: Any) -> list[pd.DataFrame]:
    """Return the rows of each site, of which one site's are changed."""
    parts = [rows[rows["hospital"] == k].drop(columns="hospital") for k in range(SITES)]
    parts[number] = change(parts[number])
    return parts


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: rows.rename(columns={"pressure": "presure"}), "'pressure' is numbers at 0, 2 and missing at 1"),
        (lambda rows: rows.assign(pressure="high"), "'pressure' is numbers at 0, 2 and categories at 1"),
        (lambda rows: rows.drop(columns="outcome"), "target: no column 'outcome'"),
        (lambda rows: rows.assign(outcome=None), "column 'outcome' is empty in row 0"),
    ],
)  # fmt: skip
def test_a_difference_is_told_by_column_before_the_first_round(change: Any, text: str, tmp_path: Path) -> None:
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
        rows[rows["hospital"] == number].drop(columns="hospital").to_csv(tmp_path / f"{number}.csv", index=False)
        site(grid, number).config["data"] = str(tmp_path / f"{number}.csv")
    server_app.serve(grid, config, PAUSE)
    told = json.loads((tmp_path / "run" / "statistics.json").read_text())["columns"]["ward"]["categories"]
    counts = [rows[rows["hospital"] == number]["ward"].value_counts() for number in range(SITES)]
    expected = {ward: sum(int(c[ward]) for c in counts if c.get(ward, 0) >= 30) for ward in rows["ward"].unique()}
    assert told == {ward: count for ward, count in expected.items() if count}


def test_pictures_in_folders_and_texts_in_files_are_read_as_the_federation_has_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"server": (8, 8), "site": (12, 10)}  # a site's pictures are scaled to the federation's
    for place, shape in shapes.items():
        for name in ("cat", "dog"):
            (tmp_path / place / name).mkdir(parents=True)
            for k in range(6):
                pixels = rng.integers(0, 255, (*shape, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / place / name / f"{k}.png")
    agreed = fl.make_task(
        f"images(folder='{tmp_path}/server')", clients=2, partition="iid", model="mlp"
    ).dataset.preprocessing
    train, test = own_data(str(tmp_path / "site"), agreed)
    assert train.inputs.shape == (12, 3, 8, 8)
    assert train.labels.tolist() == [0] * 6 + [1] * 6
    assert test is None
    np.savez(tmp_path / "all.npz", inputs=train.inputs.numpy(), labels=train.labels.numpy())
    again, _ = own_data(str(tmp_path / "all.npz"), agreed)
    assert bool((again.inputs == train.inputs).all())


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
    answers = fl.load(tmp_path / "run").predict(pd.DataFrame({"text": ["goal team goal", "bank price bank"]}))
    assert len(answers) == 2
    config = configured("topic", tmp_path / "other")
    grid = LocalGrid(nodes(SITES, tmp_path / "memory"), config)
    for number in range(SITES):
        site(grid, number).config["data"] = str(tmp_path / f"{number}.csv")
    with pytest.raises(InvalidValue, match="texts and pictures in a table need an example at the server"):
        server_app.serve(grid, config, PAUSE)
