"""Tables with named columns, from files and from other libraries; data sets of torch."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, TensorDataset

import fedloom as fl
from fedloom.common.errors import DataError, FedloomError, InvalidValue
from fedloom.common.expression import Call
from fedloom.data.columns import TableInputs
from fedloom.data.dataset import datasets
from fedloom.data.lazy import LazyInputs

ROWS = 40
COLUMNS: dict[str, Any] = {
    "age": [20 + row for row in range(ROWS)],
    "pressure": [100 + 0.5 * row for row in range(ROWS)],
    "ward": [("north", "south", "east")[row % 3] for row in range(ROWS)],
    "hospital": [f"h{row % 4}" for row in range(ROWS)],
    "outcome": [("ill", "well")[row % 2] for row in range(ROWS)],
}


def table(**options: Any) -> fl.Dataset:
    dataset: fl.Dataset = datasets.build(Call("table", named=options))
    return dataset


def csv_file(folder: Path, **changed: Any) -> str:
    columns = {name: values for name, values in (COLUMNS | changed).items() if values is not None}
    lines = [
        ",".join(columns),
        *(
            ",".join("" if x is None else str(x) for x in row)
            for row in zip(*columns.values(), strict=True)
        ),
    ]
    (folder / "patients.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "patients.csv")


def test_a_csv_file_is_columns_of_numbers_and_categories(tmp_path: Path) -> None:
    dataset = table(
        path=csv_file(tmp_path), target="outcome", group="hospital", inputs=["age", "ward"]
    )
    assert (dataset.class_names, dataset.classes, dataset.spec.shape) == (
        ("ill", "well"),
        2,
        (4,),
    )  # age; east, north, south
    assert (len(dataset.train), len(dataset.test)) == (32, 8)
    assert dataset.train.groups is not None
    for row, label, group in zip(
        dataset.train.inputs, dataset.train.labels, dataset.train.groups, strict=True
    ):
        number = int(row[0]) - 20
        assert row[1:].tolist() == [
            float(COLUMNS["ward"][number] == name) for name in ("east", "north", "south")
        ]
        assert (int(label), int(group)) == (number % 2, number % 4)


def test_numbers_are_standardised_over_training_rows_alone(tmp_path: Path) -> None:
    task = fl.make_task(
        f"table(path='{csv_file(tmp_path)}', target=outcome, group=hospital)",
        clients=0,
        partition="natural",
        model="logistic",
        local_test=0.25,
    )
    assert task.clients == 4
    training_rows = task.train.inputs[torch.from_numpy(task.partition.indices)]
    assert torch.allclose(training_rows[:, :2].mean(0), torch.zeros(2), atol=1e-6)
    assert torch.allclose(training_rows[:, :2].std(0, correction=0), torch.ones(2), atol=1e-6)
    # Test samples of clients do not influence the scale.
    assert abs(float(task.train.inputs[:, 0].mean())) > 1e-3
    assert set(training_rows[:, 2:].unique().tolist()) == {0.0, 1.0}
    assert task.train.inputs.dtype == torch.float32
    plain = table(path=csv_file(tmp_path), target="outcome", standardise=False)
    assert isinstance(plain.encoding, TableInputs)
    assert not plain.encoding.standardise


def test_floats_are_a_regression_and_whole_numbers_as_kind_says(tmp_path: Path) -> None:
    path = csv_file(tmp_path)
    assert table(path=path, target="pressure").objective.metric.name == "rmse"
    assert table(path=path, target="age").classes == ROWS
    dataset = table(path=path, target="age", kind="regression")
    assert (dataset.objective.metric.name, dataset.train.labels.dtype) == ("rmse", torch.float32)
    coded = table(path=path, target="outcome", inputs=["age"], categorical=["age"], smallest=1)
    assert coded.spec.shape == (32,)  # one for each age in the training rows
    assert bool((coded.test.inputs == 0).all())  # an age outside the training rows


def test_whole_numbers_that_nobody_calls_classes_are_told_in_a_notice_and_on_the_card(
    tmp_path: Path,
) -> None:
    numbers = np.random.default_rng(0).normal(size=60)
    frame = pd.DataFrame({"length": numbers, "quality": np.arange(60) % 6 + 3})
    options: dict[str, Any] = {"clients": 3, "partition": "iid", "model": "logistic"}

    def notices(data: Any, folder: str = "", **more: Any) -> list[str]:
        task = fl.make_task(
            data, **({} if isinstance(data, str) else {"target": "quality"}), **options, **more
        )
        directory = tmp_path / folder if folder else None
        return fl.run("fedavg", task, rounds=1, quiet=True, directory=directory).federation.notices

    frame.to_csv(tmp_path / "wine.csv", index=False)
    file = f"path='{tmp_path / 'wine.csv'}', target=quality"
    expected = (
        "the 6 whole numbers of the column 'quality' are taken as classes: "
        "objective='regression' (of a file, "
    )
    for name, data in (("frame", frame), ("file", f"table({file})")):
        (notice,) = notices(data, name)
        assert notice.startswith(expected)
        assert f"- {notice}\n" in (tmp_path / name / "model-card.md").read_text()
    assert notices(f"table({file}, kind=regression)") == []
    for objective in ("regression", "classification"):
        assert notices(frame, objective=objective) == []
    assert notices(frame.assign(quality=frame.quality % 2)) == []
    assert (
        notices(frame.assign(quality=frame.quality.map({k: f"grade {k}" for k in range(9)}))) == []
    )


def test_empty_cells_are_refused_filled_or_dropped(tmp_path: Path) -> None:
    ages = [None, *COLUMNS["age"][1:]]
    wards = [*COLUMNS["ward"][:-1], None]
    path = csv_file(tmp_path, age=ages, ward=wards)
    with pytest.raises(
        DataError,
        match=r"column 'age' is empty in row 0, and in 1 in all: .* missing='drop' \(missing",
    ):
        table(path=path, target="outcome")
    assert len(table(path=path, target="outcome", missing="drop").train) == 30
    filled = table(
        path=path, target="outcome", missing="mean", test_path=path, inputs=["age", "ward"]
    )
    task = fl.make_task(filled, clients=1, partition="iid", model="logistic")
    assert bool(filled.train.inputs[0, 0].isnan())
    assert float(task.train.inputs[0, 0]) == pytest.approx(0, abs=1e-6)  # the mean of the others
    assert filled.train.inputs[-1, 1:].sum() == 1  # a separate category


def test_test_rows_have_the_column_types_of_training_rows(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,code,label\n1.5,x,0\n2.5,7,1\n3,8,1\n")
    (tmp_path / "test.csv").write_text("label,code,a\n1,7,4\n0,9,5\n")
    paths = {"path": str(tmp_path / "train.csv"), "test_path": str(tmp_path / "test.csv")}
    assert table(**paths, smallest=1).test.inputs.tolist() == [[4, 1, 0, 0], [5, 0, 0, 0]]
    (tmp_path / "test.csv").write_text("label,code,a\n1.5,7,4\n")
    with pytest.raises(DataError, match="unreadable table"):
        table(**paths)


def test_lists_in_parquet_are_inputs_and_several_columns_name_clients(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(ROWS, 3))
    pq.write_table(pa.table(COLUMNS | {"signal": values.tolist()}), tmp_path / "a.parquet")
    dataset = table(
        path=str(tmp_path / "a.parquet"),
        target="outcome",
        inputs=["signal"],
        group=["hospital", "ward"],
        smallest=1,
    )
    assert dataset.spec.shape == (3,)
    assert dataset.train.groups is not None
    assert dataset.train.group_names is not None
    assert len(dataset.train.group_names) == 12
    assert "h0 / north" in dataset.train.group_names


def saved(folder: Path, table: pa.Table) -> None:
    """Write a folder in the format of `save_to_disk` of Hugging Face's `datasets`."""
    folder.mkdir(parents=True)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )


def test_a_saved_dataset_dict_of_pictures_or_of_text_is_read(tmp_path: Path) -> None:
    def picture(value: int) -> dict[str, Any]:
        packed = io.BytesIO()
        Image.fromarray(np.full((6, 5), value, np.uint8)).save(packed, "png")
        return {"bytes": packed.getvalue(), "path": None}

    features = {
        "info": {"features": {"label": {"names": ["zero", "one", "two"], "_type": "ClassLabel"}}}
    }
    pictures = pa.table({"image": [picture(20 * row) for row in range(6)], "label": [0, 1] * 3})
    pictures = pictures.replace_schema_metadata({"huggingface": json.dumps(features)})
    saved(tmp_path / "train", pictures)
    saved(tmp_path / "test", pictures.slice(0, 2))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    dataset = table(path=str(tmp_path))
    assert (dataset.class_names, dataset.classes, dataset.spec.shape) == (
        ("zero", "one", "two"),
        3,
        (1, 6, 5),
    )
    assert dataset.test.inputs[:, 0, 0, 0].tolist() == [0, 20]
    saved(tmp_path / "text", pa.table({"text": ["good film", "bad film"] * 4, "label": [1, 0] * 4}))
    words = table(path=str(tmp_path / "text"))
    assert (words.spec.shape, words.vocabulary, words.train.inputs[0, :3].tolist()) == (
        (200,),
        5,
        [4, 2, 0],
    )
    (tmp_path / "text" / "state.json").write_text(
        '{"_data_files": [{"filename": "../../../etc/passwd"}]}'
    )
    with pytest.raises(DataError, match="cannot be read"):
        table(path=str(tmp_path / "text"))


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_task_is_made_from_a_data_frame(library: str) -> None:
    module = pytest.importorskip(library)
    frame = module.table(COLUMNS) if library == "pyarrow" else module.DataFrame(COLUMNS)
    task = fl.make_task(
        frame, target="outcome", group="hospital", clients=0, partition="natural", model="logistic"
    )
    assert (task.clients, task.dataset.class_names, task.dataset.spec.shape) == (
        4,
        ("ill", "well"),
        (5,),
    )
    assert fl.run("fedavg", task, rounds=1).history
    error = fl.make_task(
        (frame, frame),
        target="age",
        objective="regression",
        clients=2,
        partition="iid",
        model="logistic",
    )
    assert len(error.test) == ROWS


def test_a_task_is_made_from_hugging_faces_dataset() -> None:
    library = pytest.importorskip("datasets")
    dataset = library.Dataset.from_dict(COLUMNS)
    both = library.DatasetDict({"train": dataset, "test": dataset})
    for data, tested in ((dataset, 8), (both, ROWS)):
        task = fl.make_task(data, target="outcome", clients=2, partition="iid", model="logistic")
        assert len(task.test) == tested


class Pictures:
    """A data set like torchvision's: Pillow pictures and an error beyond the last item."""

    def __init__(self, count: int = 20) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return Image.fromarray(np.full((6, 5, 3), row, np.uint8)), row % 2


def test_a_task_is_made_from_a_torch_data_set() -> None:
    inputs, labels = torch.randn(20, 3), torch.arange(20, dtype=torch.int32) % 2 + 1
    task = fl.make_task(
        TensorDataset(inputs, labels, labels), clients=0, partition="natural", model="logistic"
    )
    assert (task.clients, task.dataset.classes, len(task.test)) == (2, 2, 4)
    task = fl.make_task((Pictures(), Pictures(4)), clients=2, partition="iid", model="logistic")
    assert (task.train.inputs.dtype, task.dataset.spec.shape, len(task.test)) == (
        torch.uint8,
        (3, 6, 5),
        4,
    )
    assert task.train.inputs[7].unique().tolist() == [7]


@pytest.mark.parametrize("engine", ["rows", "stacked", "processes(workers=1)"])
def test_data_that_do_not_fit_into_memory_are_read_where_clients_train(
    engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results = []
    training = fl.Training(
        batch_size=2, epochs=2, augmentation="none" if engine == "rows" else "flip_crop"
    )
    for room in ("1", "0.000001"):
        monkeypatch.setenv("FEDLOOM_DATA_GIB", room)
        task = fl.make_task(
            Pictures(),
            clients=3,
            partition="iid",
            model="logistic",
            local_test=0.25,
            training=training,
        )
        results.append(
            fl.run(
                "fedavg",
                task,
                rounds=2,
                participation=1.0,
                engine=engine,
                directory=tmp_path / room,
            )
        )
    memory, lazy = results
    assert (
        "Pictures: 20 samples, 0 MiB, more than the 0 MiB that data may take (FEDLOOM_DATA_GIB)"
        in capsys.readouterr().err
    )
    assert isinstance(lazy.task.train.inputs, LazyInputs)
    assert lazy.task.train.inputs.nbytes < memory.task.train.inputs.nbytes
    assert torch.equal(lazy.federation.model(), memory.federation.model())
    assert lazy.history == memory.history


def test_features_that_need_all_data_in_memory_are_refused_for_lazy_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.000001")
    with pytest.raises(
        InvalidValue, match=r"merge=true needs data in memory, and Pictures is read by the clients"
    ):
        fl.make_task(Pictures(), clients=2, merge=True, local_test=0.25)
    pictures = Pictures()
    pictures.targets = [row % 2 for row in range(20)]  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Pictures, "__getitem__", lambda self, row: (np.zeros((2, 90 + row), np.float32), 0)
    )
    # This reads a single sample.
    task = fl.make_task(pictures, clients=2, partition="iid", model="logistic")
    assert task.train.labels.unique().tolist() == [0, 1]
    with pytest.raises(
        InvalidValue,
        match=r"samples of shapes .* were to be \[2, 90\] of torch.float32: resize or pad",
    ):
        fl.run("fedavg", task, rounds=1)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Odd(Pictures):
    def __getitem__(self, row: int) -> Any:
        return np.zeros(row + 1), 0


class Broken(Pictures):
    def __getitem__(self, row: int) -> Any:
        raise OSError("disk\ngone")


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        (Endless(), {}, "Endless is no data: give the name of a data set, a Dataset"),
        (3, {}, "int is no data"),
        (
            (np.zeros((9, 2)), np.arange(9)),
            {},
            "labels that are ndarrays go together: give fl.Samples(inputs, labels)",
        ),
        (Pictures(0), {}, "Pictures: no samples"),
        (Odd(), {}, "sample 1 has the shape [2], the first [1]: resize or pad them"),
        (Broken(), {}, "Broken: sample 0 raised OSError: disk gone"),
        (
            Pictures(),
            {"target": "y"},
            "target and group name columns of a table, and a Pictures has none",
        ),
        (
            "digits",
            {"target": "y"},
            "target and group name columns of a table: in the name of a data set, as table(",
        ),
        (
            pa.table({"a": [1.0, 2.0]}),
            {},
            "Table: which column is to be learned? Give target, one of: a",
        ),
        (
            pa.table({"a": [1.0], "b": [1]}),
            {"target": "bb"},
            "Table: target: no column 'bb': did you mean 'b'?",
        ),
        (pa.table({"y": [1]}), {}, "Table: inputs: no column is left"),
        (
            pa.table({"a": [np.datetime64("2020-01-01", "s")], "y": [1]}),
            {},
            "Table: column 'a' has dates: add dates=\"ordinal\"",
        ),
        (
            pa.table({"a": [np.inf, 1.0], "y": [1, 0]}),
            {},
            "column 'a': a NaN or infinity among the numbers",
        ),
        (pa.table({"a": [[1], [1, 2]], "y": [1, 0]}), {}, "column 'a': lists of different lengths"),
    ],
)
def test_objects_that_are_no_data_are_refused_in_one_line(
    data: Any, options: dict[str, str], text: str
) -> None:
    with pytest.raises(FedloomError) as caught:
        fl.make_task(data, clients=2, partition="iid", **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def _ragged(path: Path) -> None:
    path.write_text("a,b\n1,2\n3\n")


@pytest.mark.parametrize(
    ("name", "write", "text"),
    [
        ("a.csv", _ragged, "damaged csv (CSV parse error"),
        ("a.csv", lambda path: path.write_bytes(b"\xff\xfe\0\0"), "a.csv"),
        ("a.csv", lambda path: path.write_text("y,y\n1,2\n"), "two columns have one name: 'y'"),
        ("a.parquet", lambda path: path.write_bytes(b"PAR1 no"), "damaged parquet file"),
        ("a.xls", lambda path: path.write_text(""), "wanted a .csv, .tsv or .parquet file"),
        ("a", lambda path: path.mkdir(), "cannot be read"),
        ("a.csv", lambda path: None, "no such file"),
    ],
)
def test_damaged_files_are_refused_in_one_line(
    name: str, write: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    with pytest.raises(FedloomError) as caught:
        table(path=str(tmp_path / name), target="y")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_takes_no_more_memory_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a name of some length, number {row}" for row in range(1000) for _ in range(3)]
    pq.write_table(pa.table({"name": names, "y": [0, 1] * 1500}), tmp_path / "wide.parquet")
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.01")
    with pytest.raises(DataError, match=r"inputs of 'name': takes 0.02 GiB"):
        table(path=str(tmp_path / "wide.parquet"), target="y", smallest=1)
    with pytest.raises(InvalidValue, match="table needs path"):
        table()
