"""Conversion of raw data to model inputs.

Tests fitting, JSON files, comparison and new rows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedloom as fl
from fedloom.common.errors import DataError, FedloomError, InvalidValue
from fedloom.data.columns import Moments
from fedloom.data.preprocessing import PictureInputs, Preprocessing, TextInputs


def patients(rows: int = 60, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": draw.integers(20, 90, rows),
            "ward": draw.choice(["east", "north", "south"], rows),
            "pressure": draw.normal(120, 15, rows),
            "smoker": draw.random(rows) < 0.3,
        }
    )
    frame["cost"] = 400 + 3 * frame.age + 40 * (frame.ward == "north") + draw.normal(0, 5, rows)
    return frame


def fitted(frame: pd.DataFrame, **options: Any) -> tuple[fl.Task, Preprocessing]:
    task = fl.make_task(
        frame, target="cost", clients=3, partition="iid", model="logistic", **options
    )
    return task, task.dataset.preprocessing


def test_new_rows_are_encoded_like_training_rows() -> None:
    frame = patients()
    task, preprocessing = fitted(frame)
    inputs, notices = preprocessing.apply(
        frame.drop(columns=["cost"])[["ward", "smoker", "pressure", "age"]]
    )
    assert not notices
    rows = {tuple(row) for row in inputs.float().tolist()}
    assert rows == {tuple(row) for row in torch.cat([task.train.inputs, task.test.inputs]).tolist()}
    all_rows = frame.iloc[: len(frame)]
    assert preprocessing.outputs.name == "cost"
    trained = task.train.labels[torch.from_numpy(task.partition.indices)]
    assert (float(trained.mean()), float(trained.std(correction=0))) == pytest.approx(
        (0, 1), abs=1e-5
    )
    in_units = (
        preprocessing.outputs.in_units(torch.cat([task.train.labels, task.test.labels]))
        .sort()
        .values
    )
    assert in_units.tolist() == pytest.approx(sorted(all_rows.cost), rel=1e-5)


def test_json_holds_all_of_it_and_refuses_what_was_changed() -> None:
    _, preprocessing = fitted(patients())
    text = preprocessing.to_json()
    restored = Preprocessing.from_json(text)
    assert restored == preprocessing
    assert restored.digest == preprocessing.digest
    values = json.loads(text)
    values["inputs"]["columns"][0]["mean"] = [0.0]
    with pytest.raises(DataError, match="a file: changed since it was written"):
        Preprocessing.from_json(json.dumps(values), "a file")
    for damage in (
        text[:40],
        "3",
        "{}",
        '{"inputs": {"kind": "magic"}}',
        text.replace('"number"', '"magic"'),
    ):
        with pytest.raises(DataError) as caught:
            Preprocessing.from_json(damage, "a file")
        assert "\n" not in str(caught.value)


def test_moments_leave_out_empty_cells() -> None:
    draw = np.random.default_rng(1)
    values = draw.normal([1e6, 0, 5], [1, 3, 0], (50, 3))
    values[draw.random(values.shape) < 0.2] = np.nan
    moments, expected = Moments.of(torch.from_numpy(values)), pd.DataFrame(values)
    assert moments.count.tolist() == expected.count().tolist()
    assert moments.mean.tolist() == pytest.approx(expected.mean().tolist())
    assert moments.deviation[:2].tolist() == pytest.approx(expected.std(ddof=0).tolist()[:2])
    assert moments.deviation[2] == 1  # a constant column


def pa_table(frame: pd.DataFrame) -> Any:
    import pyarrow as pa

    return pa.Table.from_pandas(frame, preserve_index=False)


def test_differences_name_the_columns() -> None:
    _, preprocessing = fitted(patients())
    assert preprocessing.differences(preprocessing) == []
    for change, line in (
        ({"age": "years"}, "column 'age' is on one side alone"),
        ({"age": "age"}, ""),
    ):
        renamed = fitted(patients().rename(columns=change))[1]
        lines = preprocessing.differences(renamed)
        assert lines[:1] == ([line] if line else [])
    as_text = fitted(patients().assign(age=lambda frame: frame.age.floordiv(30).astype(str)))[1]
    assert preprocessing.differences(as_text)[0].startswith("column 'age': {'categories': None")
    other_rows = fitted(patients(seed=3))[1]
    assert any(
        line.startswith("column 'pressure': ") for line in preprocessing.differences(other_rows)
    )
    assert any(line.startswith("outputs, mean: ") for line in preprocessing.differences(other_rows))
    swapped = replace(
        preprocessing,
        inputs=replace(preprocessing.inputs, columns=preprocessing.inputs.columns[::-1]),
    )  # type: ignore[union-attr]
    assert "another order" in preprocessing.differences(swapped)[0]
    assert preprocessing.differences(replace(preprocessing, inputs=PictureInputs((1, 2, 2))))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda f: f.drop(columns=["age"]), "no column 'age', which the model was trained on"),
        (
            lambda f: f.rename(columns={"pressure": "presure"}),
            "no column 'pressure'.*: did you mean 'presure'",
        ),
        (
            lambda f: f.assign(age=[None, *f.age[1:]]),
            "column 'age' is empty in row 0, and in 1 in all: fill it",
        ),
        (
            lambda f: f.assign(age="old"),
            "column 'age' is text, and the model was trained on numbers",
        ),
        (lambda f: f.assign(age=np.inf), "column 'age': a NaN or infinity"),
        (lambda f: f.to_numpy(), "the model was trained on a table: give one, not ndarray"),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_one_line(change: Any, line: str) -> None:
    frame = patients()
    with pytest.raises(FedloomError, match=line) as caught:
        fitted(frame)[1].apply(change(frame.drop(columns=["cost"])))
    assert "\n" not in str(caught.value)


def test_unknown_columns_and_categories_are_left_out_with_a_notice() -> None:
    frame = patients()
    inputs, notices = fitted(frame)[1].apply(frame.assign(ward=["moon", *frame.ward[1:]], note="x"))
    assert notices == [
        "data: left out columns that the model was not trained on: 'note'",
        "data: column 'ward' has categories that the model was not trained on, taken for none: "
        "'moon'",
    ]
    assert inputs[0, 1:4].tolist() == [0, 0, 0]


def test_empty_cells_become_the_mean_if_training_filled_them_so() -> None:
    frame = patients()
    frame.loc[[2, 5], "age"] = np.nan
    frame.loc[3:12, "ward"] = None
    task = fl.make_task(
        frame_dataset(frame),
        clients=3, partition="iid", model="logistic",
    )  # fmt: skip
    inputs, notices = task.dataset.preprocessing.apply(frame.iloc[[2, 3]].drop(columns=["cost"]))
    assert not notices
    assert inputs[0, 0] == 0
    # None is a separate category, between N and e
    assert inputs[1, 1:5].tolist() in ([0, 1, 0, 0], [1, 0, 0, 0])
    assert bool(torch.isfinite(task.train.inputs).all())


def frame_dataset(frame: pd.DataFrame) -> fl.Dataset:
    from fedloom.data.columns import Columns
    from fedloom.data.table_rows import table_dataset

    return table_dataset("frame", pa_table(frame), None, Columns("cost", missing="mean"), "frame")


def test_pictures_are_decoded_scaled_and_normalised(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 1, 6, 6)).astype(np.uint8)
    samples = fl.Samples(pixels, [0, 1] * 4)
    dataset = fl.Dataset("p", samples, samples, mean=(0.5,), std=(0.25,))
    preprocessing = dataset.preprocessing
    assert preprocessing.inputs == PictureInputs((1, 6, 6), (0.5,), (0.25,))
    Image.fromarray(pixels[0, 0]).save(tmp_path / "a.png")
    Image.fromarray(pixels[1, 0].repeat(2, 0).repeat(2, 1)).save(tmp_path / "b.png")
    inputs = preprocessing.apply([tmp_path / "a.png", str(tmp_path / "b.png")])[0]
    assert inputs[0].equal(samples.inputs[0])
    assert tuple(inputs.shape) == (2, 1, 6, 6)
    assert (
        preprocessing.prepare(inputs)[0].tolist() == dataset.prepare(samples.inputs[:1])[0].tolist()
    )
    assert preprocessing.apply(pixels[:, 0])[0].equal(samples.inputs)
    with pytest.raises(
        InvalidValue,
        match=r"was trained on \[n, 1, 6, 6\] of uint8, not on \[1, 1, 5, 5\] of uint8",
    ):
        preprocessing.apply(np.zeros((1, 5, 5), np.uint8))
    with pytest.raises(InvalidValue, match=r"of uint8, not on .* of float32"):
        preprocessing.apply(pixels / 255)
    with pytest.raises(DataError, match=r"c\.png: cannot be read"):
        preprocessing.apply(tmp_path / "c.png")


def test_texts_become_word_numbers() -> None:
    frame = pd.DataFrame({"text": ["good film", "bad film"] * 4, "label": [1, 0] * 4})
    task = fl.make_task(frame, clients=2, partition="iid", model="fasttext(width=4)")
    preprocessing = task.dataset.preprocessing
    assert isinstance(preprocessing.inputs, TextInputs)
    assert preprocessing.apply(["Good new film"])[0][0, :4].tolist() == [4, 1, 2, 0]
    assert preprocessing.apply(frame[["text"]].head(1))[0].equal(
        preprocessing.apply("good film")[0]
    )
    assert Preprocessing.from_json(preprocessing.to_json()) == preprocessing
    foreign = replace(preprocessing, inputs=replace(preprocessing.inputs, tokenizer="os:system"))
    with pytest.raises(InvalidValue, match=r"its tokenizer is your own \(os:system\)"):
        foreign.apply(["good"])
