"""Identifiers, dates and rare categories of tables."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedloom as fl
from fedloom.common.errors import DataError, InvalidValue
from fedloom.survey.table_draft import draft_configuration

ROWS = 90
RARE = ("Xanadu", "Zyzzyx", "Quuxham")


def patients() -> pd.DataFrame:
    """Return rows of which each has its own number, a few have a rare city, and all a date."""
    row = np.arange(ROWS)
    return pd.DataFrame(
        {
            "patient_id": [f"MRN-{7919 * (k + 1)}" for k in row],
            "age": 20 + row % 60,
            "city": [*RARE, RARE[0], *np.where(row[4:] % 2 == 0, "Leeds", "York")],
            "admitted": pd.date_range("2019-12-30 06:00", periods=ROWS),
            "hospital": np.where(row % 3 == 0, "north", "south"),
            "outcome": np.where(row % 2 == 0, "ill", "well"),
        }
    )


def task(data: Any, **options: Any) -> fl.Task:
    named = {} if isinstance(data, str) else {"target": "outcome", "group": "hospital"}
    given = {"clients": 0, "partition": "natural", "model": "logistic", **named}
    return fl.make_task(data, **given | options)


def test_identifiers_and_dates_are_refused_with_the_setting_to_add(tmp_path: Path) -> None:
    frame = patients()
    frame.to_csv(tmp_path / "patients.csv", index=False)
    file = f"table(path='{tmp_path / 'patients.csv'}', target=outcome, group=hospital"
    with pytest.raises(DataError, match=r'add exclude=\["patient_id"\]') as refused:
        task(frame)
    assert "\n" not in str(refused.value)
    assert "MRN" not in str(refused.value)
    with pytest.raises(DataError, match=r'dates="ordinal".*exclude=\["patient_id", "admitted"\]'):
        task(frame, exclude=["patient_id"])
    with pytest.raises(DataError, match=r"add exclude=\['patient_id'\]"):
        task(f"{file})", partition="iid", clients=2)
    with pytest.raises(DataError, match="dates='ordinal'"):
        task(f"{file}, exclude=['patient_id'])", partition="iid", clients=2)
    for data, options in (
        (frame, {"exclude": ["patient_id"], "dates": "ordinal"}),
        (f"{file}, exclude=['patient_id'], dates='ordinal')", {}),
    ):
        assert task(data, **options).dataset.spec.shape == (5,)  # age, Leeds, York, other, admitted


NUMBERS = 104_729 * (np.arange(ROWS) + 3) % 1_000_003
"""A different whole number for each row, far apart and in no order."""


@pytest.mark.parametrize(
    ("name", "cells", "is_named"),
    [
        ("patient_id", NUMBERS, True),
        ("PatientID", NUMBERS, True),
        ("patient number", NUMBERS, True),
        ("MRN", np.where(np.arange(ROWS) == 4, np.nan, NUMBERS), True),
        ("id", 2**62 + NUMBERS, True),
        ("Unnamed: 0", np.arange(ROWS), True),
        ("position", 500 - np.arange(ROWS), True),
        ("income", NUMBERS, False),
        ("idle", NUMBERS, False),
        ("number_of_cells", NUMBERS, False),
        ("patient_id", NUMBERS + 0.5, False),
        ("visits_no", np.arange(ROWS) % 80, False),
    ],
)
def test_numbers_of_rows_or_persons_are_named_with_the_setting_to_add(
    name: str, cells: Any, is_named: bool, tmp_path: Path
) -> None:
    frame = patients()[["age", "hospital", "outcome"]].assign(**{name: cells})
    path = tmp_path / "rows.csv"
    frame.to_csv(path, index=False)
    file = f"table(path='{path}', target=outcome, group=hospital, missing=mean)"
    found = [
        [text for text in task(data, **options).notices if "another whole number" in text]
        for data, options in ((frame.fillna(7), {}), (file, {}))
    ]
    assert [len(notices) for notices in found] == [is_named] * 2
    if is_named:
        assert f"column {name!r} has another whole number in each row" in found[0][0]
        assert f'add exclude=["{name}"] unless' in found[0][0]
        assert f"add exclude=['{name}'] unless" in found[1][0]
        assert "\n" not in found[0][0]
        kept = task(frame.fillna(7), exclude=[name])
        assert not any("another whole number" in text for text in kept.notices)
    assert (f"exclude=[{name}]" in draft_configuration(str(path), "rows").replace("'", "")) == (
        is_named
    )


def test_several_numbers_are_left_out_together() -> None:
    frame = patients().drop(columns=["patient_id", "admitted"])
    given = task(frame.assign(row=range(ROWS), mrn=NUMBERS), exclude=["city"])
    (notice,) = (text for text in given.notices if "whole number" in text)
    assert "columns 'row', 'mrn' have another whole number in each row" in notice
    assert 'add exclude=["city", "row", "mrn"] unless' in notice


def test_columns_that_are_named_as_categories_are_learned_from() -> None:
    text = patients().drop(columns="admitted")
    assert task(text, exclude=["patient_id"]).dataset.spec.shape == (4,)
    visits = text.assign(patient_id=[f"p{k // 30}" for k in range(ROWS)])
    assert task(visits).dataset.spec.shape == (7,)  # three persons with many rows each


@pytest.mark.parametrize("written", ["2020-03-01", "01.03.2020", "3/1/2020"])
def test_dates_in_text_are_dates(written: str) -> None:
    frame = patients()[["age", "outcome", "hospital"]].assign(seen=written)
    with pytest.raises(DataError, match="column 'seen' has dates"):
        task(frame)
    if written == "2020-03-01":
        inputs = task(frame, dates="ordinal").dataset.train.inputs[:, 1]
        assert set(inputs.tolist()) == {18322.0}
        assert datetime.date(1970, 1, 1) + datetime.timedelta(18322) == datetime.date(2020, 3, 1)
    else:
        with pytest.raises(DataError, match="write all of them as 2024-12-31"):
            task(frame, dates="ordinal")


def test_ordinal_dates_are_days_in_training_and_in_prediction(tmp_path: Path) -> None:
    frame = patients().drop(columns="patient_id")
    given = task((frame, frame), dates="ordinal", training={"learning_rate": 0.5})
    days = given.dataset.train.inputs[:, -1]
    expected = (frame.admitted - pd.Timestamp(0)) / pd.Timedelta(days=1)
    assert torch.equal(days, torch.tensor(expected.to_numpy()))
    result = fl.run("fedavg", given, rounds=2, participation=1.0, directory=tmp_path / "run")
    rows = frame.drop(columns=["outcome", "hospital"])
    rows.to_csv(tmp_path / "rows.csv", index=False)
    model = fl.load(tmp_path / "run")
    read = pd.read_csv(tmp_path / "rows.csv")  # dates are text
    with torch.no_grad():
        exact = result.model(given.train.inputs).softmax(1).numpy()
    for table in (rows, read):
        assert np.allclose(model.predict_proba(table), exact, atol=1e-6)


def test_no_file_of_a_run_holds_a_value_of_fewer_rows_than_smallest(tmp_path: Path) -> None:
    frame = patients()
    frame["weight"] = 70.0
    frame.loc[7, "weight"] = 123456.75
    given = task((frame, frame), exclude=["patient_id"], dates="ordinal")
    result = fl.run("fedavg", given, rounds=2, directory=tmp_path, record=["trajectory"])
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {"preprocessing.json", "model-card.md", "task.json"} <= {path.name for path in files}
    texts = [*RARE, "MRN-", "123456"]
    found = [
        (p.name, text) for p, content in files.items() for text in texts if text.encode() in content
    ]
    assert found == []
    assert any(b"Leeds" in content for content in files.values())  # the search finds values
    card = (tmp_path / "model-card.md").read_text()
    assert "categories that fewer than 5 rows have are one input, other" in card
    # predictions for rows with rare values are those of the model in training
    with torch.no_grad():
        exact = result.model(given.train.inputs).softmax(1).numpy()
    assert np.allclose(fl.load(tmp_path).predict_proba(frame), exact, atol=1e-6)
    kept = task((frame, frame), exclude=["patient_id"], dates="ordinal", smallest=1)
    assert "Xanadu" in kept.dataset.preprocessing.to_json()


def test_a_mean_of_a_few_numbers_is_refused(tmp_path: Path) -> None:
    frame = patients()[["age", "hospital", "outcome"]].assign(dose=np.nan)
    frame.loc[:3, "dose"] = 77.5
    path = tmp_path / "dose.csv"
    frame.to_csv(path, index=False)
    with pytest.raises(DataError, match=r"'dose' has 4 values in 90 rows.*add exclude=\['dose'\]"):
        task(f"table(path='{path}', test_path='{path}', target=outcome, missing=mean)")


def test_a_new_category_is_other_where_rare_ones_were() -> None:
    frame = patients()[["city", "hospital", "outcome"]]
    preprocessing = task((frame, frame)).dataset.preprocessing
    inputs, notices = preprocessing.apply(frame.assign(city=["Mars", *frame.city[1:]]))
    assert inputs[0].tolist() == [0, 0, 1]
    assert "taken for other" in notices[-1]
    assert fl.Preprocessing.from_json(preprocessing.to_json()) == preprocessing


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"exclude": ["patient"]}, "exclude: no column 'patient': did you mean 'patient_id'"),
        ({"dates": "days"}, "dates must be 'refuse' or 'ordinal'"),
        ({"smallest": 0}, "smallest must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidValue, match=line):
        task(patients(), **options)
    with pytest.raises(InvalidValue, match="name columns of a table"):
        fl.make_task("digits", exclude=["a"])
