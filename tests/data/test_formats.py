"""Readers of single files: their contents, and errors for damaged files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_support import idx_bytes, picture, random_pixels
from fedloom.common.errors import DataError
from fedloom.data.convert import class_labels
from fedloom.data.dataset import Samples
from fedloom.data.formats.arrow import read_parquet
from fedloom.data.formats.pictures import read_files
from fedloom.data.formats.words import encode, tokens, vocabulary
from fedloom.data.sets.ag_news import read_csv
from fedloom.data.sets.femnist import read_leaf_images
from fedloom.data.sets.normalisation import Split
from fedloom.data.sets.origin import cached_split
from fedloom.data.sets.picture_files import (
    image_samples,
    read_idx,
    read_image_folder,
    read_python_batches,
)


def require_refusal(path: Path | str, text: str) -> pytest.RaisesExc[DataError]:
    """Require a `DataError` of one line with `path` and `text`."""
    return pytest.raises(
        DataError, match=rf"\A[^\n]*{re.escape(str(path))}[^\n]*{re.escape(text)}[^\n]*\Z"
    )


def python2_pickle(entries: dict[str, object]) -> bytes:
    """Write a dictionary like the pickle module of Python 2, protocol 2: byte strings, and arrays
    with `_reconstruct`.
    """

    def string(value: bytes) -> bytes:
        return b"T" + len(value).to_bytes(4, "little") + value

    def write(value: object) -> bytes:
        if isinstance(value, str):
            return string(value.encode())
        if isinstance(value, int):
            return b"J" + value.to_bytes(4, "little", signed=True)
        if isinstance(value, list):
            return b"](" + b"".join(write(item) for item in value) + b"e"
        assert isinstance(value, np.ndarray)
        make = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        kind = (
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN"
            + write(-1)
            + write(-1)
            + b"K\x00tb"
        )
        shape = write(value.shape[0]) + write(value.shape[1]) + b"\x86"
        return make + b"(K\x01" + shape + kind + b"\x89" + string(value.tobytes()) + b"tb"

    return (
        b"\x80\x02}("
        + b"".join(write(key) + write(value) for key, value in entries.items())
        + b"u."
    )


# --- idx ---


@settings(deadline=None, max_examples=20)
@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), packed=st.booleans())
def test_idx_gives_back_what_was_written(
    shape: list[int], packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    array = random_pixels(*shape)
    path = tmp_path_factory.mktemp("idx") / "file"
    path.write_bytes(gzip.compress(idx_bytes(array)) if packed else idx_bytes(array))
    assert torch.equal(read_idx(path), torch.from_numpy(array))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (gzip.compress(idx_bytes(random_pixels(9, 9)))[:-12], "damaged gzip"),
        (b"\x1f\x8b\x08nonsense", "damaged gzip"),
        (b"PK\x03\x04 and more", "not an idx file of bytes (it begins with 50 4b 03 04)"),
        (b"", "not an idx file"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 0]), "not an idx file of bytes (it begins with 00 00 0d 01)"),
        (bytes([0, 0, 8, 3, 0, 0]), "damaged gzip or idx file"),
        (idx_bytes(random_pixels(9, 9))[:-1], "92 bytes, but an idx file of shape [9, 9] has 93"),
        (idx_bytes(random_pixels(9, 9)) + b"x", "94 bytes"),
    ],
)
def test_damaged_idx_files_are_named(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "digits").write_bytes(content)
    with require_refusal(tmp_path / "digits", text):
        read_idx(tmp_path / "digits")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with require_refusal(tmp_path / "absent", "cannot be read"):
        read_idx(tmp_path / "absent")


# --- CIFAR ---


@pytest.mark.parametrize("form", ["python 2", 0, 1, 2, 4, 5])
def test_python_batches_of_every_pickle_protocol_are_read(form: str | int, tmp_path: Path) -> None:
    pixels, labels = random_pixels(7, 3072), [3, 0, 9, 1, 1, 2, 8]
    batch: dict[str, object] = {
        "batch_label": "one of one",
        "labels": labels,
        "data": pixels,
        "filenames": ["a.png"] * 7,
    }
    content = (
        python2_pickle(batch) if form == "python 2" else pickle.dumps(batch, protocol=int(form))
    )
    (tmp_path / "data_batch_1").write_bytes(content)
    pictures = read_python_batches([tmp_path / "data_batch_1"] * 2, "labels", 10)
    assert pictures.labels.tolist() == labels * 2
    assert torch.equal(pictures.inputs[:7], torch.from_numpy(pixels.reshape(7, 3, 32, 32)))
    assert torch.equal(pictures.inputs[7:], pictures.inputs[:7])


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_in_column_order_are_read_in_theirs(protocol: int, tmp_path: Path) -> None:
    pixels = np.asfortranarray(random_pixels(5, 3072))
    (tmp_path / "batch").write_bytes(
        pickle.dumps({"data": pixels, "labels": [0] * 5}, protocol=protocol)
    )
    pictures = read_python_batches([tmp_path / "batch"], "labels", 10)
    assert np.array_equal(pictures.inputs.numpy().reshape(5, 3072), pixels)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_and_nothing_runs(protocol: int, tmp_path: Path) -> None:
    pwned = tmp_path / "pwned"
    (tmp_path / "batch").write_bytes(
        pickle.dumps({"data": _Bomb(pwned), "labels": [1]}, protocol=protocol)
    )
    with require_refusal(tmp_path / "batch", "no rows of 3072 bytes"):
        read_python_batches([tmp_path / "batch"], "labels", 10)
    assert not pwned.exists()


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"labels": [1]}, "no rows of 3072 bytes"),
        ({"data": random_pixels(1, 3072)}, "1 inputs but 0 labels"),
        ({"data": random_pixels(1, 3071), "labels": [1]}, "no rows of 3072 bytes"),
        ({"data": random_pixels(2, 3072), "labels": [1]}, "2 inputs but 1 labels"),
        ({"data": random_pixels(1, 3072), "labels": [10]}, "label 10 in row 0 is outside 0..9"),
        ({"data": random_pixels(1, 3072), "labels": ["x"]}, "1 inputs but 0 labels"),
        ({"data": np.zeros((2, 3072)), "labels": [1, 1]}, "16 inputs but 2 labels"),
        ({"data": np.zeros((2, 3072), dtype=object), "labels": [1, 1]}, "no rows of 3072 bytes"),
    ],
)
def test_wrong_python_batches_are_named(
    batch: dict[str, object], text: str, tmp_path: Path
) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps(batch))
    with require_refusal(tmp_path / "batch", text):
        read_python_batches([tmp_path / "batch"], "labels", 10)


@pytest.mark.parametrize("content", [b"", pickle.dumps({"data": b"x"})[:-4]])
def test_damaged_pickles_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(content)
    with require_refusal(tmp_path / "batch", "damaged pickle"):
        read_python_batches([tmp_path / "batch"], "labels", 10)


# --- pictures and tables ---


def test_pictures_decode_to_their_pixels(tmp_path: Path) -> None:
    pixels = random_pixels(3, 8, 6, 3)
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    for path, image in zip(paths, pixels, strict=True):
        path.write_bytes(picture(image))
    assert np.array_equal(read_files(paths, 3).numpy(), pixels.transpose(0, 3, 1, 2))
    assert read_files(paths, 1).shape == (3, 1, 8, 6)
    assert read_files(paths, 3, (4, 5)).shape == (3, 3, 4, 5)


def test_many_pictures_keep_their_order(tmp_path: Path) -> None:
    values = np.arange(1203) % 251
    contents = [picture(np.full((2, 2), value, dtype=np.uint8)) for value in range(251)]
    table = pa.table(
        {
            "image": [{"bytes": contents[value], "path": None} for value in values],
            "label": values % 10,
        }
    )
    samples = image_samples(table, "label", 10, 1, "table")
    assert np.array_equal(samples.inputs[:, 0, 1, 1].numpy(), values)
    assert np.array_equal(samples.labels.numpy(), values % 10)


def test_unreadable_pictures_are_named(tmp_path: Path) -> None:
    good = picture(random_pixels(8, 8, 3), "JPEG")
    (tmp_path / "a.jpg").write_bytes(good)
    bad = tmp_path / "b.jpg"
    for content, text in (
        (good[: len(good) // 2], "unreadable picture"),
        (b"text", "not a picture in a known format"),
    ):
        bad.write_bytes(content)
        with require_refusal(bad, text):
            read_files([tmp_path / "a.jpg", bad], 3)
    bad.write_bytes(picture(random_pixels(8, 9, 3), "JPEG"))
    with require_refusal(bad, "8 x 9 pixels, but"):
        read_files([tmp_path / "a.jpg", bad], 3)
    with require_refusal(tmp_path / "c.jpg", "cannot be read"):
        read_files([tmp_path / "a.jpg", tmp_path / "c.jpg"], 3)


def test_image_folder_names_strange_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with require_refusal(tmp_path, "no pictures"):
        read_image_folder(tmp_path, ["cat"], 3)
    (tmp_path / "dog").mkdir()
    with require_refusal(tmp_path / "dog", "no such class"):
        read_image_folder(tmp_path, ["cat"], 3)


def test_pictures_in_parquet_are_read(tmp_path: Path) -> None:
    pixels = random_pixels(4, 5, 5, 3)
    rows = [{"bytes": picture(image), "path": f"{at}.png"} for at, image in enumerate(pixels)]
    pq.write_table(
        pa.table({"img": rows, "label": [0, 1, 2, 1]}), tmp_path / "a.parquet", row_group_size=2
    )
    paths = [tmp_path / "a.parquet"] * 2
    samples = image_samples(read_parquet(paths), "label", 3, 3, "here")
    assert np.array_equal(
        samples.inputs.numpy(), np.concatenate([pixels, pixels]).transpose(0, 3, 1, 2)
    )
    plain = pa.table({"image": [row["bytes"] for row in rows], "label": [0, 1, 2, 1]})
    assert torch.equal(image_samples(plain, "label", 3, 3, "here").inputs, samples.inputs[:4])


def test_damaged_tables_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nothing PAR1")
    with require_refusal(path, "damaged parquet"):
        read_parquet([path])
    good = {"bytes": picture(random_pixels(5, 5, 3)), "path": ""}
    cases: list[tuple[dict[str, object], str]] = [
        ({"image": [good], "target": [0]}, "no column 'label' (it has: image, target)"),
        ({"picture": [good], "label": [0]}, "no column 'image' or 'img'"),
        ({"image": [good], "label": [3]}, "label 3 in row 0 is outside 0..2"),
        ({"image": [good, good], "label": [0, None]}, "nothing in column 'label' of row 1"),
        ({"image": [good, {"bytes": b"x", "path": ""}], "label": [0, 0]}, "row 1: not a picture"),
        ({"image": [good, {"bytes": None, "path": "x"}], "label": [0, 0]}, "row 1: no picture"),
        ({"image": ["text"], "label": [0]}, "pictures must be stored as bytes"),
    ]
    for columns, text in cases:
        with require_refusal("source", text):
            image_samples(pa.table(columns), "label", 3, 3, "source")


# --- LEAF ---


def leaf_json(writers: dict[str, tuple[np.ndarray, list[int]]]) -> str:
    return json.dumps(
        {
            "users": list(writers),
            "num_samples": [len(labels) for _, labels in writers.values()],
            "user_data": {
                name: {"x": (pixels.reshape(-1, 784) / 255).tolist(), "y": labels}
                for name, (pixels, labels) in writers.items()
            },
        }
    )


def test_leaf_gives_back_every_byte(tmp_path: Path) -> None:
    every = np.resize(np.arange(256, dtype=np.uint8), (2, 28, 28))
    (tmp_path / "all_data_0.json").write_text(
        leaf_json({"f1": (every, [0, 61]), "f0": (random_pixels(1, 28, 28), [5])})
    )
    (name, samples), (second_name, _) = read_leaf_images(tmp_path / "all_data_0.json")
    assert (name, second_name) == ("f1", "f0")
    assert np.array_equal(samples.inputs.numpy()[:, 0], every)
    assert samples.labels.tolist() == [0, 61]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"users": [', "damaged json"),
        ("[1]", "no LEAF file"),
        ('{"users": ["a"], "user_data": {}}', "no LEAF file (wanted users"),
        (
            '{"users": ["a"], "user_data": {"a": {"x": [[0.5, 0.5]], "y": [1]}}}',
            "lists of 784 numbers",
        ),
        (
            json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.0] * 784], "y": [62]}}}),
            "label 62 in row 0",
        ),
        (
            json.dumps({"users": ["a"], "user_data": {"a": {"x": [[2.0] * 784], "y": [6]}}}),
            "pixels must be in 0..1",
        ),
        (
            json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.0] * 784], "y": [6, 7]}}}),
            "1 inputs but 2 labels",
        ),
    ],
)
def test_damaged_leaf_files_are_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text(text)
    with require_refusal(tmp_path / "data.json", reason):
        read_leaf_images(tmp_path / "data.json")


# --- text ---


def naive_basic_english(line: str) -> list[str]:
    line = line.lower()
    for mark, instead in (
        ("'", " ' "),
        ('"', ""),
        (".", " . "),
        ("<br />", " "),
        (",", " , "),
        ("(", " ( "),
    ):
        line = line.replace(mark, instead)
    for mark, instead in ((")", " ) "), ("!", " ! "), ("?", " ? "), (";", " "), (":", " ")):
        line = line.replace(mark, instead)
    return line.split()


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="aB'\".,()!?;:<>br/ \t-é4", max_size=40) | st.text(max_size=30))
def test_tokens_follow_the_basic_english_rules(line: str) -> None:
    assert tokens(line) == naive_basic_english(line)


def test_vocabulary_ranks_by_count_then_alphabet() -> None:
    texts = [["b", "a", "c"], ["b", "a"], ["d"]]
    assert vocabulary(texts) == {"a": 2, "b": 3, "c": 4, "d": 5}
    assert vocabulary(texts, most=4) == {"a": 2, "b": 3}
    counted = Counter(token for text in texts for token in text)
    assert set(vocabulary(texts)) == set(counted)
    assert encode([["a", "zebra"], ["c", "b", "a", "a"], []], vocabulary(texts), 3).tolist() == [
        [2, 1, 0],
        [4, 3, 2],
        [0, 0, 0],
    ]


def test_csv_reads_quoted_commas_and_names_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('"3","A, ""quoted"" title","line one\nline two"\n"4","b","c"\n')
    assert read_csv(path, 3) == [["3", 'A, "quoted" title', "line one\nline two"], ["4", "b", "c"]]
    for text, reason in (
        ('"1","a","b"\n"2","c"\n', "wanted rows of 3 cells each"),
        ('"1","a","b"\n"2","c","unfinished', "damaged csv"),
        ("", "wanted rows of 3 cells each"),
    ):
        path.write_text(text)
        with require_refusal(path, reason):
            read_csv(path, 3)
    path.write_bytes(b'"1","\xff\xfe","b"\n')
    with require_refusal(path, "damaged csv"):
        read_csv(path, 3)


def test_labels_must_be_integers_of_the_classes() -> None:
    assert class_labels([0, 2], 3, "here").dtype == torch.int64
    for values, reason in (
        ([0, 3], "label 3 in row 1"),
        ([-1], "label -1"),
        ([0.5], "list of integers"),
        ([10**30], "list of integers"),
        ([[1], [1, 2]], "list of integers"),
    ):
        with require_refusal("here", reason):
            class_labels(values, 3, "here")


# --- cache ---


def one_split(number: int = 0) -> Split:
    samples = Samples(torch.arange(6.0).view(2, 3).t(), torch.full((3,), number))
    return samples, samples[:1]


def test_cache_makes_once_and_again_after_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    calls: list[int] = []

    def make() -> Split:
        calls.append(1)
        return one_split()

    for key in ("a", "a", "b"):
        train, test = cached_split("set", key, make)
        assert torch.equal(train.inputs, one_split()[0].inputs)
        assert (train.groups, len(test)) == (None, 1)
    assert len(calls) == 2
    for file in (tmp_path / "cache").iterdir():
        file.write_bytes(b"torn")
    assert torch.equal(cached_split("set", "a", make)[0].inputs, train.inputs)
    assert len(calls) == 3
    assert all(file.suffix == ".safetensors" for file in (tmp_path / "cache").iterdir())


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file" / "cache"))
    assert len(cached_split("set", "a", one_split)[0]) == 3


def test_the_cache_follows_size_and_time_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a"
    values = []
    for number, (content, changed) in enumerate(
        (("one", 2), ("two", 2), ("two", 1), ("longer", 1))
    ):
        path.write_text(content)
        os.utime(path, ns=(changed, changed))
        train, _ = cached_split("set", "a", partial(one_split, number), [path])
        values.append(int(train.labels[0]))
    assert values == [0, 0, 2, 3]
