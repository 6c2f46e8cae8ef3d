"""Damaged and malicious data files.

Each file is read, or a one-line error names it.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import csv

import fedloom as fl
from fedloom.common.errors import DataError, FedloomError, InvalidValue
from fedloom.data.dataset import datasets
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.formats.pictures import read_files
from fedloom.data.sets.picture_files import read_idx
from hostile_files import WRITERS, Sets, changed, grey, patients, saved


def require_one_line(error: FedloomError) -> None:
    assert str(error).isprintable()
    assert len(str(error)) < 2100


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Sets:
    return Sets(tmp_path_factory.mktemp("hostile"))


ODD: dict[str, bytes | Callable[[Path], object]] = {
    "a folder": Path.mkdir, "a pipe": os.mkfifo, "no end": lambda path: path.symlink_to("/dev/zero"),
    "empty": b"", "a zero": b"\0", "a line": b"\n", "zeros": bytes(4096), "ones": b"\xff" * 4096,
    "no UTF-8": b"a,b\n\xff\xfe,\xc3\n", "a list": b"[]", "a number": b"7", "commas": b"," * 4096, "a pickle": pickle.dumps({}),
    "a picture": grey(3), "deep": b"[" * 100_000, "an archive": b"PK\x05\x06" + bytes(18),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_is_something_else_is_told_in_one_line(name: str, sets: Sets) -> None:
    for file in sets.files(name):
        if file.name == "dataset_info.json":
            continue
        refused = 0
        for content in ODD.values():
            try:
                sets.build(name, file, content)
            except FedloomError as error:
                require_one_line(error)
                refused += 1
        assert refused >= 2, file


@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_file_is_read_or_told_in_one_line(
    name: str, sets: Sets, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(name)
    files = {file: sets.content(name, file) for file in sets.files(name)}
    for _ in range(60):
        file = draw.choice(list(files))
        try:
            sets.build(name, file, changed(files[file], draw))
        except FedloomError as error:
            require_one_line(error)


# --- tables ---


def build(path: Path, **options: Any) -> fl.Dataset:
    text = "".join(f", {name}={value}" for name, value in options.items())
    dataset: fl.Dataset = datasets.build(f"table(path='{path}'{text})")
    return dataset


def write(table: pa.Table, path: Path) -> None:
    """Write the table to a file in the format of its suffix, or to a folder with `save_to_disk`."""
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        saved(path, table)


KINDS = ("t.csv", "t.parquet", "t")


@pytest.mark.parametrize("kind", KINDS)
def test_two_columns_of_one_name_are_told(kind: str, tmp_path: Path) -> None:
    table = pa.table(
        [pa.array([1, 2]), pa.array([1, 2]), pa.array([0, 1])], names=["a", "a", "label"]
    )
    write(table, tmp_path / kind)
    with pytest.raises(DataError, match="two columns have one name: 'a'"):
        build(tmp_path / kind)


def test_two_columns_of_one_name_in_tables_in_memory_are_told() -> None:
    table = pa.table(
        [pa.array([1, 2]), pa.array([1, 2]), pa.array([0, 1])], names=["a", "a", "label"]
    )
    with pytest.raises(FedloomError, match=r"two columns have one name: 'a'"):
        fl.make_task(table, clients=1, partition="iid")
    frame = pytest.importorskip("pandas").DataFrame(
        [[1, 2, 0], [1, 2, 1]], columns=["a", "a", "label"]
    )
    with pytest.raises(FedloomError, match=r"[Dd]uplicate column names"):
        fl.make_task(frame, clients=1, partition="iid")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("role", ["label", "group", "input"])
def test_whole_numbers_beyond_int64_are_told_or_rounded(
    role: str, kind: str, tmp_path: Path
) -> None:
    large = pa.array([2**63 + 5, 2**64 - 1, 3, 4], type=pa.uint64())
    columns = {
        "label": pa.array([0, 1, 0, 1]),
        "group": pa.array([0, 1, 0, 1]),
        "input": pa.array([1.0, 2.0, 3.0, 4.0]),
    }
    write(pa.table(columns | {role: large}), tmp_path / kind)
    if role == "label" and kind != "t.csv":
        with pytest.raises(FedloomError, match=r"labels hold \d+, more than 2\^63 - 1"):
            build(tmp_path / kind, target="label", kind="classification")
    elif role == "label":  # strings of digits are class names, because a CSV file has no types
        dataset = build(tmp_path / kind, target="label", kind="classification")
        assert set(map(str, large.to_pylist())) == set(dataset.class_names or ())
    elif role == "input" and kind == "t.csv":  # too many digits for a float: category names
        dataset = build(
            tmp_path / kind, target="label", group="group", test_fraction=0.5, smallest=1
        )
        assert set(dataset.train.inputs.unique().tolist()) == {0.0, 1.0}
    else:
        dataset = build(tmp_path / kind, target="label", group="group", test_fraction=0.5)
        inputs = [*dataset.train.inputs.flatten().tolist(), *dataset.test.inputs.flatten().tolist()]
        expected = [
            float(value) for value in (large.to_pylist() if role == "input" else [1, 2, 3, 4])
        ]
        assert sorted(inputs) == pytest.approx(sorted(expected))


@pytest.mark.parametrize(
    "array", [np.array([2**63, 1], np.uint64), np.array([[1], [2**64 - 1]], np.uint64)]
)
def test_whole_numbers_beyond_int64_in_arrays_are_told(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(InvalidValue, match=r"inputs hold \d+, more than 2\^63 - 1"):
        fl.Samples(array, [0, 1])
    if array.ndim == 1:
        with pytest.raises(InvalidValue, match="labels hold 9223372036854775808, more"):
            fl.Samples(np.zeros((2, 1)), array)
        with pytest.raises(InvalidValue, match="groups hold 9223372036854775808, more"):
            fl.Samples(np.zeros((2, 1)), [0, 1], array)


def test_bytes_that_are_no_text_are_told() -> None:
    with pytest.raises(InvalidValue, match="labels are bytes that are no text in UTF-8"):
        fl.Samples(np.zeros((2, 1)), np.array([b"\xff", b"a"]))


@pytest.mark.parametrize("kind", ["t.parquet", "t"])
@pytest.mark.parametrize("column", ["label", "group", "ward"])
def test_text_that_is_no_utf_8_is_told(column: str, kind: str, tmp_path: Path) -> None:
    text = pa.array([b"a", b"\xff\xfe"] * 2, pa.binary()).view(pa.string())
    columns = {name: pa.array(["a", "b"] * 2) for name in ("label", "group", "ward")}
    write(pa.table(columns | {column: text}), tmp_path / kind)
    with pytest.raises(DataError, match=r"(?i)utf-?8"):
        build(tmp_path / kind, target="label", group="group")


def test_names_that_are_no_utf_8_are_told(tmp_path: Path) -> None:
    write(pa.table({"label": ["a", "b"], "abc": [1.0, 2.0]}), tmp_path / "t.parquet")
    content = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(content.replace(b"abc", b"\xff\xfe\xff"))
    with pytest.raises(DataError):
        build(tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_bytes(b"label,\xff\xfe\n1,2\n0,3\n")
    with pytest.raises(DataError):
        build(tmp_path / "t.csv")


ARROW: dict[str, pa.Array] = {
    "time": pa.array([1, 2] * 4, pa.timestamp("us")),
    "day": pa.array([1, 2] * 4, pa.date32()),
    "decimal": pa.array([1, 2] * 4, pa.decimal128(30, 2)),
    "nothing": pa.nulls(8),
    "struct": pa.array([{"a": 1}, {"a": 2}] * 4),
    "map": pa.array([[("a", 1)]] * 8, pa.map_(pa.string(), pa.int64())),
    "lists": pa.array([[1], [1, 2]] * 4),
    "lists of text": pa.array([["a"], ["b"]] * 4),
    "even lists": pa.array([[1, 2], [3, 4]] * 4),
    "bytes": pa.array([b"a", b"b"] * 4),
    "categories": pa.array(["a", "b"] * 4).dictionary_encode(),
    "half": pa.array(np.ones(8, np.float16)),
    "infinite": pa.array([np.inf, np.nan] * 4),
    "runs": pa.RunEndEncodedArray.from_arrays([8], [1.5]),
    "view": pa.array(["a", "b"] * 4, pa.string_view()),
    "large": pa.array(["a", "b"] * 4, pa.large_string()),
}


@pytest.mark.parametrize("kind", list(ARROW))
@pytest.mark.parametrize("role", ["label", "group", "ward", "number"])
def test_columns_of_any_type_are_read_or_told(kind: str, role: str, tmp_path: Path) -> None:
    columns = {
        "label": ["a", "b"] * 4,
        "group": ["a", "b"] * 4,
        "ward": ["a", "b"] * 4,
        "number": [1.0, 2.0] * 4,
    }
    saved(tmp_path / "t", pa.table(columns | {role: ARROW[kind]}))
    for missing in ("refuse", "mean", "drop"):
        for learned in ("auto", "classification", "regression"):
            options = {"target": "label", "group": "group", "kind": learned, "missing": missing}
            try:
                build(tmp_path / "t", **options, categorical="[ward]")
            except FedloomError as error:
                require_one_line(error)


def test_offsets_that_lead_nowhere_are_told(tmp_path: Path) -> None:
    """Invalid offsets are reported, because Arrow trusts them and reading them may crash."""
    offsets = pa.py_buffer(np.array([0, 1, 2**30, 3, 4], np.int32).tobytes())
    text = pa.StringArray.from_buffers(4, offsets, pa.py_buffer(b"abcd"))
    saved(tmp_path / "t", pa.table({"label": ["a", "b"] * 2, "ward": text}))
    with pytest.raises(DataError):
        build(tmp_path / "t")


def test_a_parquet_file_is_counted_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 5_000_000
    column = pa.array(np.zeros(rows, np.int64))
    pq.write_table(pa.table({"a": column, "label": column}), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 300_000
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.1")
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)  # a call would raise
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        DataError, match=r"takes 0.4\d GiB of memory, more than the 0.10 GiB that it may take"
    ):
        build(tmp_path / "t.parquet")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 30_000


def test_a_csv_file_is_counted_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("a,label\n" + "1,0\n" * 1_000_000)
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.05")
    monkeypatch.setattr(csv, "read_csv", None)
    with pytest.raises(DataError, match=r"takes 0.0\d GiB of memory, more than the 0.05 GiB"):
        build(tmp_path / "t.csv")


def test_rows_of_one_long_text_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = pa.DictionaryArray.from_arrays(np.zeros(200, np.int32), [b"y" * (1 << 20)])
    pq.write_table(
        pa.table({"a": text.cast(pa.binary()), "label": [0] * 200}), tmp_path / "t.parquet"
    )
    assert (tmp_path / "t.parquet").stat().st_size < 300_000
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.05")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="GiB of memory, more than"):
        build(tmp_path / "t.parquet")
    # reading all rows takes 204,800
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200_000


@pytest.mark.parametrize("kind", ["t.csv", "t.parquet"])
def test_ten_thousand_columns_are_read(kind: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    columns = {f"c{k}": draw.normal(size=20) for k in range(10_000)}
    write(pa.table(columns | {"label": np.arange(20) % 2}), tmp_path / kind)
    dataset = build(tmp_path / kind)
    assert dataset.train.inputs.shape == (16, 10_000)
    rows = np.array(list(columns.values())).T
    inputs = np.concatenate([dataset.train.inputs.numpy(), dataset.test.inputs.numpy()])
    assert np.array_equal(np.sort(inputs, 0), np.sort(rows, 0))


# --- the other readers ---


def test_dimensions_without_elements_are_read_or_told(tmp_path: Path) -> None:
    for shape in ([0, 2**32 - 1, 2**32 - 1], [0] * 255, [2**32 - 1, 0]):
        sizes = b"".join(size.to_bytes(4, "big") for size in shape)
        (tmp_path / "i").write_bytes(bytes([0, 0, 8, len(shape)]) + sizes)
        try:
            assert read_idx(tmp_path / "i").numel() == 0
        except DataError as error:
            require_one_line(error)


def test_arrays_without_bytes_are_told(tmp_path: Path) -> None:
    header = b"{'descr': '|S0', 'fortran_order': False, 'shape': (4611686018427387904,), }\n"
    (tmp_path / "own").mkdir()
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "own" / "inputs.npy").write_bytes(content)
    with pytest.raises(DataError, match="inputs"):
        read_arrays(tmp_path / "own")


def test_a_picture_that_other_programs_would_interpret_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n"
    )
    with Image.open(tmp_path / "a.png") as opened:
        assert opened.format == "EPS"
    with pytest.raises(DataError, match="not a picture in a known format"):
        read_files([tmp_path / "a.png"], 3)


def test_arrays_of_any_type_are_read_or_told(tmp_path: Path) -> None:
    kinds = (
        ">f8",
        ">i4",
        "<u8",
        "?",
        "S3",
        "U3",
        "M8[s]",
        "c16",
        "f2",
        "<f16",
        "V8",
        [("a", "i4"), ("b", "f8")],
    )
    for kind in kinds:
        for key in ("inputs", "labels", "groups"):
            arrays: dict[str, Any] = {
                "inputs": np.zeros((4, 2)),
                "labels": np.arange(4) % 2,
                "groups": np.arange(4),
            }
            arrays[key] = np.zeros(arrays[key].shape, np.dtype(kind))
            buffer = io.BytesIO()
            np.savez(buffer, **arrays)
            (tmp_path / "a.npz").write_bytes(buffer.getvalue())
            try:
                datasets.build(f"arrays(path='{tmp_path}/a.npz', test_fraction=0.5)")
            except FedloomError as error:
                require_one_line(error)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    for kind in KINDS:
        write(patients(), tmp_path / kind)
        dataset = build(
            tmp_path / kind,
            target="outcome",
            group="hospital",
            missing="mean",
            test_fraction=0.5,
            smallest=1,
        )
        assert dataset.class_names == ("ill", "well")
        assert dataset.train.group_names == ("h0", "h1", "h2")
        rows = sorted([*dataset.train.inputs.tolist(), *dataset.test.inputs.tolist()])
        assert [row[0] for row in rows] == list(range(20, 32))
        assert [row[2:4] for row in rows] == [[1.0, 0.0], [0.0, 1.0]] * 6
        assert [row[4] for row in rows] == [float(k % 3 == 0) for k in range(12)]
