"""Classes keep their names, and notices report each guess of a reader."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedloom as fl
from fedloom.common.digest import digest_of_json
from fedloom.common.errors import DataError, FedloomError, InvalidValue, error_location
from fedloom.data.columns import TableInputs
from fedloom.data.preprocessing import Preprocessing
from fedloom.serving.predictor import Predictor

TRAINING = {"learning_rate": 1.0, "epochs": 5, "batch_size": 10}


def task(data: Any, **options: Any) -> fl.Task:
    return fl.make_task(
        data,
        **{"clients": 2, "partition": "iid", "model": "logistic", "training": TRAINING} | options,
    )


def answers(frame: pd.DataFrame, folder: Path) -> list[Any]:
    given = task(frame, target="y")
    fl.run("fedavg", given, rounds=4, participation=1.0, directory=folder, engine="rows")
    predictions: list[Any] = fl.load(folder).predict(frame[["a"]][:2]).tolist()
    return predictions


@pytest.mark.parametrize(
    "labels",
    [
        ["01", "02"],
        ["1", "01"],
        ["1", "2"],
        ["12345678901234567890", "2"],
        ["None", "mild"],
        ["True", "yes"],
        [True, False],
        [1, 2],
        [-3, 7],
        [0, 100_000],
    ],
)
def test_predictions_are_the_labels_as_they_were(labels: list[Any], tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, -1.0] * 40, "y": labels * 40})
    predictions = answers(frame, tmp_path / "run")
    assert predictions == labels
    assert [type(found) for found in predictions] == [type(label) for label in labels]


def test_files_of_earlier_versions_have_no_type_of_labels() -> None:
    frame = pd.DataFrame({"a": [1.0, -1.0] * 40, "y": [3, 4] * 40})
    preprocessing = task(frame, target="y").dataset.preprocessing
    values = asdict(preprocessing)
    del values["outputs"]["label_type"], values["inputs"]["dates"]
    for column in values["inputs"]["columns"]:
        del column["other"]
    digest = digest_of_json(values)
    read = Preprocessing.from_json(json.dumps({**values, "digest": digest}))
    assert (read.digest, read.outputs.label_type) == (digest, "")
    module = nn.Linear(1, 2)
    assert Predictor(module, read).answers(torch.eye(2)).tolist() == [3, 4]
    changed = preprocessing.to_json().replace('"number"', '"text"')
    with pytest.raises(DataError, match="changed since it was written"):
        Preprocessing.from_json(changed)


def test_names_of_classes_in_another_order_are_the_same_classes() -> None:
    datasets = pytest.importorskip("datasets")

    def part(names: list[str], rows: int, other: int = 0) -> Any:
        value = datasets.Value("float32")
        kinds = datasets.Features({"x": value, "label": datasets.ClassLabel(names=names)})
        signs = [1.0 if names[row % 2] == "ham" else -1.0 for row in range(rows)]
        return datasets.Dataset.from_dict(
            {"x": signs, "label": [row % 2 for row in range(rows)]}, features=kinds
        )

    given = task((part(["ham", "spam"], 80), part(["spam", "ham"], 20)))
    inputs, labels = given.test.inputs[:, 0], given.test.labels
    assert torch.equal(labels == 0, inputs > 0)
    assert given.dataset.class_names == ("ham", "spam")
    with pytest.raises(DataError, match="has the class 'eggs', which those to train on have not"):
        task((part(["ham", "spam"], 80), part(["spam", "eggs"], 20)))


def test_a_column_called_text_hides_no_other_in_silence() -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"age": draw.normal(size=60), "content": draw.normal(size=60), "y": ["p", "q"] * 30}
    )
    assert task(frame, target="y").train.inputs.shape[1] == 2
    frame["text"] = [f"word {row}" for row in range(60)]
    notices = task(frame, target="y", model="fasttext").notices
    assert len(notices) == 1
    assert "learns from the column 'text' only, without 'age', 'content'" in notices[0]


@pytest.mark.parametrize(
    ("cell", "is_told"), [("1,000", True), ("45%", True), ("about 4", True), ("4.5", False)]
)
def test_text_that_is_nearly_numbers_is_told(cell: str, is_told: bool, tmp_path: Path) -> None:
    cells = [f"{row / 7:.3f}" for row in range(99)] + [cell]
    rows = "".join(f'"{cell}",{"pq"[row % 2]}\n' for row, cell in enumerate(cells))
    (tmp_path / "a.csv").write_text("x,y\n" + rows)
    notices = task(f"table(path='{tmp_path / 'a.csv'}', target='y', test_fraction=0.01)").notices
    if is_told:
        assert "because of 1 other texts, first in row 99:" in notices[0]
        assert not any(cell in notice for notice in notices)  # a run stores its notices
    else:
        assert notices == []


def test_one_huge_number_is_told_and_keeps_its_column_finite() -> None:
    values = [0.0, 1.0] * 30
    values[3] = 1e200
    frame = pd.DataFrame({"b": values, "y": ["p", "q"] * 30})
    whole = (frame, frame)
    given = task(whole, target="y")
    assert given.train.inputs.isfinite().all()
    assert len(given.train.inputs.unique()) > 1
    assert "column 'b' holds a number in row 3 that is" in given.notices[0]
    frame["b"] = [0.0] * 59 + [1.0]
    assert task((frame, frame), target="y").notices == []  # rare, but the only information


def test_lists_without_numbers_are_refused() -> None:
    frame = pd.DataFrame({"a": np.arange(60.0), "x": [[]] * 60, "y": [0, 1] * 30})
    with pytest.raises(DataError, match="column 'x' has lists without a number"):
        task(frame, target="y")


def test_column_names_may_be_numbers_or_pairs() -> None:
    frame = pd.DataFrame({0: np.arange(60.0), 1: [0, 1] * 30})
    assert task(frame, target=1).dataset.classes == 2
    frame.columns = pd.MultiIndex.from_tuples([("a", "x"), ("b", "y")])
    assert task(frame, target=("b", "y")).dataset.classes == 2


def test_remedies_for_frames_are_options_of_make_task() -> None:
    frame = pd.DataFrame({"a": [1.0, np.nan] * 30, "y": [0, 1] * 30})
    with pytest.raises(DataError, match="fill it, or leave these rows out") as caught:
        task(frame, target="y")
    assert "missing=" not in str(caught.value)


def test_whole_numbers_stored_as_floats_are_told() -> None:
    frame = pd.DataFrame({"a": [1.0, -1.0] * 40, "y": [0.0, 1.0] * 40})
    given = task(frame, target="y")
    assert not given.objective.classes
    assert "target 'y' holds 2 whole numbers, stored as floats" in given.notices[0]
    assert task(frame, target="y", objective="classification").dataset.classes == 2


def test_labels_in_a_column_get_a_cure_that_keeps_them() -> None:
    labels = np.arange(30)[:, None] % 3
    samples = fl.Samples(np.zeros((30, 2)), labels)
    with pytest.raises(InvalidValue, match=r"give labels\[:, 0\]"):
        fl.Dataset("d", samples, samples)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.numpy().astype(int),
        lambda x: x.half(),
        lambda x: x.bfloat16(),
        lambda x: x.clone().requires_grad_(),
        lambda x: x.to_sparse(),
        lambda x: x.numpy().astype(object),
        lambda x: pd.DataFrame(x.numpy().astype(int)).astype("Int64"),
    ],
)
def test_inputs_of_every_type_of_number_are_learned(convert: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = (torch.randn(30, 4, generator=draw) * 4).round()
    samples = fl.Samples(convert(inputs), np.arange(30) % 2)
    given = fl.make_task(fl.Dataset("d", samples, samples), clients=2, partition="iid", model="mlp")
    assert torch.equal(given.train.inputs, inputs)
    fl.run("fedavg", given, rounds=1, participation=1.0, engine="rows")


def test_masked_cells_are_refused() -> None:
    masked = np.ma.masked_less(np.array([[-999.0, 1.0]] * 30), 0)  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidValue, match="inputs hold masked cells"):
        fl.Samples(masked, np.arange(30) % 2)


@pytest.mark.parametrize(
    "inputs",
    [
        np.zeros((8, 12, 12, 3), np.float32),
        np.zeros((8, 12, 12, 1), np.float32),
        torch.zeros(8, 12, 12, 3, dtype=torch.uint8),
        torch.zeros(8, 12, 12, 4),
    ],
)
def test_channels_last_is_refused_for_all_types(inputs: Any) -> None:
    with pytest.raises(InvalidValue, match="have their channels last"):
        fl.Samples(inputs, np.arange(8) % 2)
    assert fl.Samples(np.zeros((8, 64, 100, 1), np.float32), np.arange(8) % 2).inputs.shape[1] == 64


def test_layout_is_of_floats_too(tmp_path: Path) -> None:
    pictures = np.random.default_rng(0).random((10, 12, 12, 3)).astype(np.float32)
    np.savez(tmp_path / "a.npz", inputs=pictures, labels=np.arange(10) % 2)
    data = f"arrays(path='{tmp_path / 'a.npz'}', layout='channels_last', test_fraction=0.4)"
    given = task(data, clients=1)
    assert given.train.inputs.shape[1:] == (3, 12, 12)
    assert any(
        np.array_equal(given.train.inputs[0].permute(1, 2, 0).numpy(), picture)
        for picture in pictures
    )


def test_an_encoding_has_no_category_for_markers() -> None:
    frame = pd.DataFrame({"c": ["NA", "x"] * 30, "y": ["p", "q"] * 30})
    encoding = task(frame, target="y").dataset.encoding
    assert isinstance(encoding, TableInputs)
    assert encoding.columns[0].categories == ("NA", "x")
    with pytest.raises(FedloomError):
        task(frame, target="z")


def test_equal_targets_are_shared_out_at_random() -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"a": np.repeat(np.arange(10.0), 100), "y": 0.0})
    frame.loc[draw.choice(1000, 100, False), "y"] = 1 + draw.random(100)
    given = fl.make_task(frame, target="y", clients=5, partition="dirichlet(0.1)")
    for client in range(5):
        values = given.dataset.train.inputs[given.partition[client], 0].unique()
        assert len(values) >= 9  # in row order, some clients had 4


def test_the_quantiles_of_a_constant_are_the_constant() -> None:
    frame = pd.DataFrame({"a": 1.5, "y": [0, 1] * 250})
    found = fl.statistics(task(frame, target="y"), smallest=1).frame().loc["a"]
    assert all(found[f"{share}%"] == pytest.approx(1.5) for share in (5, 25, 50, 75, 95))


@pytest.mark.parametrize("smallest", [1, 5])
@pytest.mark.parametrize("shift", [0.0, 100.0, -200.0])
def test_quantiles_are_in_the_range_of_a_skewed_column(shift: float, smallest: int) -> None:
    skewed = np.exp(2 * np.random.default_rng(0).normal(size=500)) + shift
    frame = pd.DataFrame({"a": skewed, "b": -skewed, "y": [0, 1] * 250})
    found = fl.statistics(task(frame, target="y"), smallest=smallest).frame()
    for name in ("a", "b"):
        quantiles = [found.loc[name, f"{share}%"] for share in (5, 25, 50, 75, 95)]
        assert frame[name].min() <= min(quantiles) <= max(quantiles) <= frame[name].max()


def test_errors_of_compiled_libraries_name_no_place_in_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("")
    with pytest.raises(DataError) as caught:
        fl.make_task(f"table(path='{tmp_path / 'e.csv'}', target='y')")
    assert "Empty CSV file" in str(caught.value)
    assert "notebook cell" not in error_location(caught.value)
