"""One file per client: patterns, folders and lists of tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedloom as fl
from fedloom.common.errors import DataError
from fedloom.common.expression import show
from json_lines import json_lines

SITES = {"west": 30, "east": 24, "north": 40}


def rows(count: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    age = draw.integers(20, 90, count)
    return pd.DataFrame({"age": age, "outcome": np.where(age > 55, "ill", "well")})


def hospitals(folder: Path, **changed: pd.DataFrame) -> Path:
    """Write one CSV file per hospital, and a text file that is no table."""
    folder.mkdir()
    (folder / "README.txt").write_text("three hospitals")
    for seed, (name, count) in enumerate(SITES.items()):
        changed.get(name, rows(count, seed)).to_csv(folder / f"{name}.csv", index=False)
    return folder


def task(path: Any, options: str = "", **settings: Any) -> fl.Task:
    return fl.make_task(
        f"table(path={show(path)}, target=outcome, test_fraction=0.25{options})",
        clients=0,
        partition="natural",
        model="logistic",
        **settings,
    )


def test_files_of_a_folder_a_pattern_or_a_list_are_clients_by_name(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "data")
    files = [str(folder / f"{name}.csv") for name in SITES]
    for path in (str(folder), str(folder / "*.csv"), files):
        given = task(path)
        assert given.client_names == ("east", "north", "west")
        counts = given.partition.sizes.tolist()
        held = np.bincount(given.test.groups.numpy()).tolist()  # type: ignore[union-attr]
        assert [a + b for a, b in zip(counts, held, strict=True)] == [24, 40, 30]
        for client, name in enumerate(given.client_names):
            ages = set(rows(SITES[name], list(SITES).index(name)).age)
            index = given.partition[client]
            assert set(given.dataset.train.inputs[index, 0].tolist()) <= ages


def test_clients_keep_their_names_in_files_tables_and_frames(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "data")
    given = task(str(folder), local_test=0.25)
    result = fl.run(
        "ditto", given, rounds=2, personal_every=1, participation=1.0, directory=tmp_path / "run"
    )
    frame = result.clients()
    assert frame[frame.model == "personal"].client.tolist() == ["east", "north", "west"]
    assert {"accuracy", "samples"} <= set(frame)
    last = json_lines(tmp_path / "run" / "clients.jsonl")[-1]["client"]
    assert frame[frame.model == "client"].accuracy.tolist() == last["accuracy"]
    page = tmp_path / "report.html"
    result.report(page)
    assert all(name in page.read_text() for name in SITES)


def test_names_of_clients_with_few_rows_are_in_no_file(tmp_path: Path) -> None:
    frame = rows(60, 0)
    frame["person"] = ["Ada Byron"] * 4 + ["Many"] * 56
    given = fl.make_task(
        frame, target="outcome", group="person", clients=0, partition="natural", model="logistic"
    )
    assert given.client_names == ("#0", "Many")
    fl.run("fedavg", given, rounds=1, directory=tmp_path)
    assert all(b"Ada" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_types_follow_from_all_files_together(tmp_path: Path) -> None:
    west = rows(30, 0).assign(age=lambda frame: frame.age + 0.5)
    empty = rows(24, 1).assign(age=np.nan)
    folder = hospitals(tmp_path / "data", west=west, east=empty)
    given = task(str(folder), ", missing=mean")
    assert given.dataset.spec.shape == (1,)
    assert int(given.dataset.train.inputs.isnan().sum()) == given.partition.sizes[0]


@pytest.mark.parametrize(
    ("frame", "line"),
    [
        (rows(30, 0).rename(columns={"age": "years"}), r"west.csv: no column 'age', which .*east.csv has"),
        (rows(30, 0).assign(more=1.0), r"east.csv: no column 'more', which .*west.csv has.*exclude"),
        (rows(30, 0).assign(age="old"), r"west.csv: column 'age' is text, and numbers in .*east.csv"),
    ],
)  # fmt: skip
def test_columns_that_differ_are_refused_with_file_and_column(
    frame: pd.DataFrame, line: str, tmp_path: Path
) -> None:
    folder = hospitals(tmp_path / "data", west=frame)
    with pytest.raises(DataError, match=line) as refused:
        task(str(folder))
    assert "\n" not in str(refused.value)


def test_a_column_of_one_file_may_be_excluded(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "data", west=rows(30, 0).assign(more=1.0))
    assert task(str(folder), ", exclude=[more]").dataset.spec.shape == (1,)


def test_missing_and_ambiguous_files_are_refused(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "data")
    with pytest.raises(DataError, match="no file has such a name"):
        task(str(tmp_path / "*.csv"))
    with pytest.raises(DataError, match=r"south.csv: no such file"):
        task([str(folder / "south.csv")])
    (folder / "west.tsv").write_text("age\toutcome\n1\till\n")
    with pytest.raises(DataError, match="name one client, 'west': rename one"):
        task(str(folder))
