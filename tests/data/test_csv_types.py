"""Column types of CSV files; predictions leave copied columns unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedloom as fl
from fedloom.common.errors import DataError, InvalidValue
from fedloom.data.formats.arrow import read_any
from fedloom.data.formats.arrow_columns import MARKERS
from fedloom.serving.prediction_files import predict_file

TRAINING = {"learning_rate": 1.0, "epochs": 5, "batch_size": 10}


def read(folder: Path, text: str | bytes, name: str = "a.csv") -> dict[str, list[Any]]:
    content = text if isinstance(text, bytes) else text.encode()
    (folder / name).write_bytes(content)
    values: dict[str, list[Any]] = read_any(folder / name)[0].to_pydict()
    return values


def trained(
    folder: Path, data: Any, rounds: int = 6, **options: Any
) -> fl.serving.predictor.Predictor:
    task = fl.make_task(data, clients=2, partition="iid", training=TRAINING, **options)
    fl.run("fedavg", task, rounds=rounds, participation=1.0, directory=folder, engine="rows")
    return fl.load(folder)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "NULL", "3"], [1, None, 3]),
        (["1.5", "#N/A", " 3 "], [1.5, None, 3.0]),
        (["1.5", "-", "n/a"], [1.5, None, None]),
        (["007", "008", "9"], ["007", "008", "9"]),
        (["0", "0.5", "-0.5"], [0, 0.5, -0.5]),
        (["12345678901234567890", "2", "3"], ["12345678901234567890", "2", "3"]),
        (["None", "mild", ""], ["None", "mild", None]),
        (["NA", "DE", "None"], ["NA", "DE", "None"]),
        (["True", "False", ""], [True, False, None]),
        (["1,5", "2", "3"], ["1,5", "2", "3"]),
    ],
)
def test_the_cells_of_a_column_decide_its_type(
    cells: list[str], expected: list[Any], tmp_path: Path
) -> None:
    frame = pd.DataFrame({"a": cells, "row": ["x", "y", "z"]})
    frame.to_csv(tmp_path / "f.csv", index=False)
    found = read(tmp_path, (tmp_path / "f.csv").read_text())["a"]
    if cells == ["1,5", "2", "3"]:
        expected = [1.5, 2.0, 3.0]
    assert found == expected


@pytest.mark.parametrize("marker", [mark for mark in MARKERS if mark])
def test_markers_are_empty_cells_of_numbers_and_text_elsewhere(marker: str, tmp_path: Path) -> None:
    table = read(tmp_path, f"x,c\n1.5,{marker}\n{marker},b\n")
    assert table == {"x": [1.5, None], "c": [marker, "b"]}


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("a;b\n1,5;Zürich\n2;Bern\n".encode(), "a.csv"),
        ("a\tb\n1.5\tZürich\n2\tBern\n".encode(), "a.csv"),
        ("a,b\n1.5,Zürich\n2,Bern\n".encode("utf-16"), "a.csv"),
        ("\ufeffa,b\r\n1.5,Zürich\r\n2,Bern\r\n".encode(), "A.CSV"),
    ],
)
def test_separators_encodings_and_decimal_commas_are_detected(
    content: bytes, name: str, tmp_path: Path
) -> None:
    assert read(tmp_path, content, name) == {"a": [1.5, 2.0], "b": ["Zürich", "Bern"]}


def test_thousands_are_not_read_as_decimals(tmp_path: Path) -> None:
    assert read(tmp_path, "a;b\n1,000;x\n20;y\n") == {"a": ["1,000", "20"], "b": ["x", "y"]}


def test_another_encoding_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2 is not UTF-8.*Save the file as CSV UTF-8"):
        read(tmp_path, "town\nZürich\n".encode("latin-1"))


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (b"a|y\n1|0\n2|1\n", "separator='|'", {1.0, 2.0}),
        (b"a;y\n1,000;0\n2,000;1\n", "decimal=','", {1.0, 2.0}),
        (b"a;y\n1,5;0\n2,5;1\n", "decimal='.'", {0.0, 1.0}),  # text: two categories
        ("ä,y\n1.5,0\n2.5,1\n".encode("latin-1"), "encoding='latin-1'", {1.5, 2.5}),
    ],
)
def test_separator_decimal_mark_and_encoding_can_be_given(
    content: bytes, options: str, expected: set[float], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    path = tmp_path / "a.csv"
    task = fl.make_task(
        f"table(path='{path}', test_path='{path}', target='y', standardise=false, smallest=1, "
        f"{options})",
        clients=1,
        partition="iid",
        model="logistic",
    )
    assert set(task.train.inputs.flatten().tolist()) == expected
    assert task.test.inputs.equal(task.train.inputs)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("separator='ab'", "separator must be one character, not 'ab'"),
        ("encoding='latin-99'", "encoding must be a text encoding, .* not 'latin-99'"),
        ("decimal=';'", "decimal must be"),
    ],
)
def test_formats_that_no_csv_file_has_are_refused(options: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\n1,0\n2,1\n")
    with pytest.raises(InvalidValue, match=text):
        fl.make_task(f"table(path='{tmp_path / 'a.csv'}', target='y', {options})", clients=1)


def test_line_breaks_in_quotes_are_part_of_the_cell(tmp_path: Path) -> None:
    rows = "".join(f'"line one {row}\r\nline two",{row}\r\n' for row in range(1000))
    table = read(tmp_path, "text,row\r\n" + rows)
    assert table["row"] == list(range(1000))
    assert table["text"] == [f"line one {row}\r\nline two" for row in range(1000)]


def codes(folder: Path) -> Path:
    names, classes = ["007", "A12", "008", "B7"], ["p", "q", "q", "p"]
    rows = "".join(f"{names[row % 4]},{classes[row % 4]}\n" for row in range(200))
    (folder / "codes.csv").write_text("code,y\n" + rows)
    return folder / "codes.csv"


def test_categories_are_the_same_text_in_training_tests_and_prediction(tmp_path: Path) -> None:
    path = codes(tmp_path)
    (tmp_path / "test.csv").write_text("code,y\n007,p\n008,q\n")
    data = f"table(path='{path}', test_path='{tmp_path / 'test.csv'}', target='y')"
    model = trained(tmp_path / "run", data)
    assert fl.make_task(data, clients=2, partition="iid").test.inputs.sum(1).tolist() == [1, 1]
    (tmp_path / "new.csv").write_text("code\n007\n008\n")
    predict_file(model, tmp_path / "new.csv", tmp_path / "out.csv")
    assert pd.read_csv(tmp_path / "out.csv").prediction.tolist() == ["p", "q"]


def test_copied_columns_are_written_as_they_were(tmp_path: Path) -> None:
    model = trained(tmp_path / "run", f"table(path='{codes(tmp_path)}', target='y')", 1)
    content = "id,big,country,code\n007,12345678901234567890,NA,A12\n8,2,None,B7\n"
    (tmp_path / "ids.csv").write_text(content)
    predict_file(model, tmp_path / "ids.csv", tmp_path / "out.csv")
    before, after = (
        pd.read_csv(tmp_path / name, dtype=str, keep_default_na=False)
        for name in ("ids.csv", "out.csv")
    )
    assert after[list(before)].equals(before)


def test_numbers_of_training_must_be_numbers_in_prediction(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0] * 20, "y": ["p", "q"] * 20})
    model = trained(tmp_path / "run", frame, 1, target="y")
    (tmp_path / "new.csv").write_text("a\n007\n1e3\n")
    assert predict_file(model, tmp_path / "new.csv", tmp_path / "out.csv") == 2
    (tmp_path / "new.csv").write_text("a\n1\ntwo\n")
    with pytest.raises(DataError, match="column 'a' is text: 'two' in row 1"):
        predict_file(model, tmp_path / "new.csv", tmp_path / "out.csv")


def test_texts_to_predict_stay_as_they_are(tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": ["good film", "bad film"] * 40, "label": ["p", "q"] * 40})
    model = trained(tmp_path / "run", frame, 3, target="label", model="fasttext")
    expected = model.predict(["good", "bad"]).tolist()
    for texts in (
        np.array(["good", "bad"]),
        pd.Series(["good", "bad"]),
        np.array(["good", "bad"], object),
    ):
        assert model.predict(texts).tolist() == expected
    for text in ("123\n456\n", "good\nNA\n", "2020-01-01\n2020-01-02\n"):
        (tmp_path / "new.csv").write_text("text\n" + text)
        assert predict_file(model, tmp_path / "new.csv", tmp_path / "out.csv") == 2
    for text in ("good\x0cfilm\nbad\n", "good\u2028film\r\nbad", "\ufeffgood film\nbad\n"):
        (tmp_path / "new.txt").write_text(text, encoding="utf-8", newline="")
        assert predict_file(model, tmp_path / "new.txt", tmp_path / "out.csv") == 2
        assert "\ufeff" not in (tmp_path / "out.csv").read_text()


def test_text_none_and_an_empty_cell_are_two_categories(tmp_path: Path) -> None:
    frame = pd.DataFrame({"c": ["None", None, "x"] * 20, "y": ["p", "q", "p"] * 20})
    frame.to_parquet(tmp_path / "n.parquet")
    data = f"table(path='{tmp_path / 'n.parquet'}', target='y', missing='mean')"
    task = fl.make_task(data, clients=2, partition="iid", model="logistic")
    assert task.dataset.encoding.columns[0].categories == ("", "None", "x")  # type: ignore[union-attr]
    model = trained(tmp_path / "run", data, model="logistic")
    assert model.predict(frame[["c"]][:3]).tolist() == ["p", "q", "p"]


def test_a_process_that_has_read_a_csv_has_no_pool_of_threads(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\n" + "1.5,x\n" * 1000)
    script = (
        "import threading, os\nfrom pathlib import Path\n"
        "from fedloom.data.formats.arrow import read_any\n"
        "import pyarrow\nbefore = len(os.listdir('/proc/self/task'))\n"
        f"read_any(Path({str(tmp_path / 'a.csv')!r}))\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    if not Path("/proc/self/task").is_dir():
        pytest.skip("threads are counted in /proc")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= 1  # the file reader; a pool would have at least two
