"""From the CSV files of three hospitals to figures by hospital, with the commands only."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedloom as fl
from fedloom.cli import main

SIZES = {"east": 60, "north": 90, "west": 50}


def patients(count: int, seed: int) -> pd.DataFrame:
    """Return rows with a number of the patient, a date, empty cells and a rare class."""
    draw = np.random.default_rng(seed)
    age = draw.integers(20, 90, count)
    return pd.DataFrame(
        {
            "patient_id": [f"{seed}-{7919 * k}" for k in range(count)],
            "record_no": np.arange(count) + 1000 * seed,
            "age": age,
            "weight": np.where(draw.random(count) < 0.1, np.nan, draw.normal(75, 12, count)),
            "smoker": draw.choice(["yes", "no"], count),
            "admitted": pd.date_range("2021-01-01", periods=count),
            "outcome": np.where(age + draw.normal(0, 8, count) > 84, "ill", "well"),
        }
    )


@pytest.fixture
def hospitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hospitals").mkdir()
    for seed, (name, count) in enumerate(SIZES.items()):
        patients(count, seed + 1).to_csv(tmp_path / "hospitals" / f"{name}.csv", index=False)
    return tmp_path


def test_three_files_become_figures_by_hospital(
    hospitals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "hospitals/"]) == 0
    text = (hospitals / "hospitals.toml").read_text()
    for line in (
        "# target: outcome (by its name)",
        "# left out: patient_id, which has nearly as many values as rows",
        "# left out: record_no, which numbers the rows",
        "# dates become numbers of days: admitted",
        "# 3 clients, one file each, with their rows: east 60, north 90, west 50",
    ):
        assert f"{line}\n" in text
    files = sorted((hospitals / "hospitals").glob("*.csv"))
    pooled = pd.concat(map(pd.read_csv, files), ignore_index=True)
    shares = pooled.outcome.value_counts(normalize=True)
    assert f"# classes: well {shares['well']:.1%}, ill {shares['ill']:.1%}\n" in text
    assert f"empty cells get the mean: weight {pooled.weight.isna().sum()}\n" in text
    assert main(["run", "hospitals.toml", "--quiet"]) == 0
    assert main(["new", "hospitals/"]) == 2  # does not overwrite
    capsys.readouterr()
    words = ["evaluate", "runs/hospitals", "hospitals/", "--positive", "ill"]
    assert main([*words, "--json", "figures.json"]) == 0
    shown = capsys.readouterr().out
    lines = json.loads((hospitals / "figures.json").read_text())["metrics"]
    assert {line["client"]: line["rows"] for line in lines} == {"all rows": 200, **SIZES}
    assert all(name in shown for name in SIZES)
    predicted = fl.load("runs/hospitals").predict(pooled)
    assert lines[0]["accuracy"] == pytest.approx((predicted == pooled.outcome).mean())
    run = next((hospitals / "runs" / "hospitals").rglob("task.json"))
    assert json.loads(run.read_text())["client_names"] == list(SIZES)


def test_one_file_has_a_column_of_clients_or_equal_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = patients(80, 0)
    frame["clinic"] = np.where(np.arange(80) % 2 == 0, "a", "b")
    frame.to_csv("one.csv", index=False)
    assert main(["new", "one.csv"]) == 0
    settings = tomllib.loads(Path("one.toml").read_text())
    assert (settings["data"]["partition"], settings["data"]["clients"]) == ("natural", 0)
    assert "group='clinic'" in settings["data"]["name"]
    numbers = frame[["age", "weight"]].fillna(70.5)
    numbers.to_csv("numbers.csv", index=False)
    assert main(["new", "numbers.csv"]) == 0
    settings = tomllib.loads(Path("numbers.toml").read_text())
    assert settings["data"]["partition"] == "iid"
    assert "kind='regression'" in settings["data"]["name"]
    assert "target='weight'" in settings["data"]["name"]
    for name in ("one", "numbers"):
        assert main(["run", f"{name}.toml", "rounds=1", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--target", "outcom"], "target: no column 'outcom': did you mean 'outcome'?"),
        (["--group", "wards"], "group: no column 'wards'"),
    ],
)
def test_wrong_columns_are_one_line(
    words: list[str], line: str, hospitals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "hospitals/", *words]) == 2
    assert line in capsys.readouterr().err
    assert main(["new", "nothing/"]) == 2
    assert not list(hospitals.glob("*.toml"))


def test_statistics_count_the_empty_cells_of_every_hospital(
    hospitals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = patients(50, 3).assign(weight=np.nan)  # a hospital without scales
    frame.to_csv(hospitals / "hospitals" / "west.csv", index=False)
    table = "table(path='hospitals', target=outcome, exclude=[patient_id, admitted])"
    (hospitals / "a.toml").write_text(
        'name = "a"\nalgorithm = "fedavg"\nrounds = 1\nparticipation = 1.0\nmodel = "logistic"\n'
        f'[data]\nname = "{table}"\nclients = 0\n'
        'partition = "natural"\n'
    )
    assert main(["statistics", "a.toml", "--smallest", "1", "--output", "a.json"]) == 0
    column = json.loads((hospitals / "a.json").read_text())["columns"]["weight"]
    task = fl.make_task(
        table.replace("exclude", "missing=mean, exclude"),
        clients=0,
        partition="natural",
        model="logistic",
    )
    rows = task.dataset.train.inputs[task.partition.indices, 2]
    assert (column["count"], column["empty"]) == (
        int((~rows.isnan()).sum()),
        int(rows.isnan().sum()),
    )
    assert column["empty"] >= task.partition.sizes[-1]
