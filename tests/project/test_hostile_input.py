"""Hostile input at each entry point gives a one-line answer, quickly and in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from fedloom.algorithm import algorithms
from fedloom.common.errors import (
    LONGEST_QUOTED,
    CheckpointError,
    DataError,
    FedloomError,
    InvalidValue,
    quoted,
)
from fedloom.common.expression import Call, show
from fedloom.data.dataset import datasets
from fedloom.data.formats.arrow import read_parquet
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.formats.pictures import read_files
from fedloom.data.noise import label_noises
from fedloom.data.partition import partitions
from fedloom.data.sets.ag_news import read_csv
from fedloom.data.sets.femnist import read_leaf_images
from fedloom.data.sets.picture_files import image_samples, read_idx, read_python_batches
from fedloom.data.shift import shifts
from fedloom.engines.base import engines
from fedloom.models import models
from fedloom.recording.recorder import recorders
from fedloom.rounds.checkpoint import RoundLog
from fedloom.runs.config_file import configuration, put, read_table
from fedloom.runs.directory import read_json
from fedloom.runs.trackers.tracker import trackers
from fedloom.serving.artifact import load_model
from fedloom.sites.agreement import read_configuration
from fedloom.state.tensors import _checksum
from forking_cli import require_one_short_line


@pytest.mark.parametrize(
    "text", ["rounds = " + "9" * 5000, "rounds = " + "[" * 3000, "rounds = " + "[" * 60 + "]" * 60]
)
def test_a_bad_deployment_is_refused_in_one_short_line(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_configuration(text)
    require_one_short_line(str(caught.value))


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 5000, "nan", ""])
def test_a_bad_record_is_damaged(content: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"result.json is missing or damaged"):
        read_json(tmp_path / "result.json", dict)
    (tmp_path / "metrics.jsonl").write_text(content)
    assert RoundLog(tmp_path / "metrics.jsonl").read() == []


def test_an_endless_file_is_no_configuration() -> None:
    with pytest.raises(InvalidValue, match="is longer than"):
        read_table(Path("/dev/zero"))


@given(st.text(max_size=500) | st.integers() | st.lists(st.text()))
def test_a_value_is_quoted_in_short(value: Any) -> None:
    text = quoted(value)
    assert text.isprintable()
    assert text == repr(value) or "characters)" in text
    assert len(text) <= 10 * LONGEST_QUOTED + 30  # one character can become \U0010ffff


# --- arbitrary input ---

_NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, 1, -1, 10**30, 10**400, 2**63, 1e300, 1e-320, 0.5])
)
_WORDS = st.text(max_size=5) | st.sampled_from(
    ["none", "auto", "a/b", "ray://", "cuda:99999999999", "os:getcwd", "no.such:thing", "\0", "\ud800", "'", "[", 300 * "y"]
)  # fmt: skip
_PLAIN = st.none() | st.booleans() | _NUMBERS | _WORDS
_VALUES = st.recursive(
    _PLAIN,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_WORDS, inside, max_size=2),
    max_leaves=5,
)
_REGISTRIES = (
    algorithms,
    datasets,
    partitions,
    models,
    recorders,
    trackers,
    engines,
    label_noises,
    shifts,
)


@st.composite
def _expressions(draw: st.DrawFn) -> str:
    """Draw a registered name with random values for its options."""
    entry = draw(st.sampled_from([entry for registry in _REGISTRIES for entry in registry]))
    names = (
        draw(st.lists(st.sampled_from(list(entry.parameters)), max_size=3, unique=True))
        if entry.parameters
        else []
    )
    positional = draw(
        st.sampled_from(
            [(), (Call("fedavg"),), (Call("umf", (Call("fedmr"),)),), (0.1,), ([1, 2],), ("x",)]
        )
    )
    until = draw(st.sampled_from([None, None, 2, "auto"]))
    named = {name: draw(_NUMBERS | _PLAIN | st.lists(_PLAIN, max_size=3)) for name in names}
    return str(Call(entry.name, positional, named, until))


_KEYS = st.sampled_from(
    ["algorithm", "algorithms", "rounds", "participation", "seed", "seeds", "name", "model", "engine", "device", "threads",
     "workers", "pool", "record", "trackers", "targets", "last", "evaluate_every", "personal_every", "directory", "settings",
     "settings.rounds", "data", "data.name", "data.clients", "data.partition", "data.label_noise", "data.shift",
     "data.local_test", "training",
     "training.epochs", "training.learning_rate", "training.optimizer", "training.optimizer_options", "training.batch_size"]
)  # fmt: skip


@settings(deadline=10_000, max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        _KEYS | _WORDS, _VALUES | _expressions() | st.lists(_expressions(), max_size=2), max_size=3
    ),
    st.booleans(),
)
def test_any_configuration_is_read_or_refused_in_one_short_line(
    keys: dict[str, Any], typed: bool
) -> None:
    table: dict[str, Any] = {}
    try:
        for key, value in keys.items():
            if typed:
                put(table, f"{key}={value if isinstance(value, str) else show(value)}")
            else:
                *above, name = key.split(".")
                inner = table.setdefault(above[0], {}) if above else table
                if isinstance(inner, dict):
                    inner[name] = value
        parsed = configuration(table)
        for method in parsed.methods:
            parsed.resolved(method, parsed.seed)
    except FedloomError as error:
        require_one_short_line(str(error))


# --- data ---


def idx_bytes(shape: Sequence[int], content: bytes = b"") -> bytes:
    return (
        bytes([0, 0, 8, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape) + content
    )


def npz_bytes(header: str, size: int = 64) -> bytes:
    """Return an archive with this header and an array of zeros."""
    text = header.encode() + b"\n"
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED) as archive, archive.open("inputs.npy", "w") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(size))
    return buffer.getvalue()


def parquet_bytes(**columns: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


def picture_bytes(*shape: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros(shape, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def model_bytes(metadata: str) -> bytes:
    """Return a model file with arbitrary metadata and the matching digest."""
    tensors = {"weight": torch.zeros(10, 64)}
    return save(tensors, {"fedloom": metadata, "digest": _checksum(tensors, metadata)})


def leaf_bytes(users: Any, data: Any) -> bytes:
    return json.dumps({"users": users, "num_samples": [1], "user_data": data}).encode()


def read_pictures(path: Path) -> Any:
    return image_samples(read_parquet([path]), "label", 10, 1, str(path))


def read_texts(path: Path) -> Any:
    return read_csv(path, 3)


def read_leaf(path: Path) -> Any:
    return read_leaf_images(path)


def read_batch(path: Path) -> Any:
    return read_python_batches([path], "labels", 10)


def header(shape: str, descr: str = "|u1") -> str:
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"


PIXELS = [0.5] * 784
NESTED: list[Any] = []
for _ in range(40):
    NESTED = [NESTED, NESTED]  # 2^40 lists in a pickle of a few hundred bytes

HOSTILE: list[tuple[Callable[[Path], Any], bytes, str]] = [
    (read_arrays, npz_bytes(header("(1000000000000,)")), "of shape (1000000000000,) in"),
    (read_arrays, npz_bytes(header("(100000000000, 0)")), "of shape (100000000000, 0) in"),
    (read_arrays, npz_bytes(header("(True,)")), "of shape (True,) in"),
    (read_arrays, npz_bytes(header("(-1,)")), "of shape (-1,) in"),
    (read_arrays, npz_bytes(header("(((((((")), "damaged, or neither an npz"),
    (read_arrays, npz_bytes("(" * 3000), "damaged, or neither an npz"),
    (read_arrays, npz_bytes(header("(8,)", "O")), "Object arrays"),
    (read_arrays, npz_bytes(header(f"({1 << 25},)"), 1 << 25), "takes 0.03 GiB of memory, more "
                                                               "than the 0.01 GiB"),
    (read_idx, idx_bytes([10**9, 28, 28]), "takes 730.16 GiB of memory"),
    (read_idx, gzip.compress(idx_bytes([10**9, 28, 28])), "takes 730.16 GiB of memory"),
    (read_idx, gzip.compress(idx_bytes([9], bytes(1 << 25))), "18 bytes or more, but an idx "
                                                              "file of shape [9] has 17"),
    (read_idx, gzip.compress(idx_bytes([0xFFFFFFFF] * 255)), "GiB of memory"),
    (read_idx, bytes([0, 0, 8, 0]), "4 bytes, but an idx file of shape [] has 5"),
    (read_leaf, leaf_bytes(3, {}), "no LEAF file"),
    (read_leaf, leaf_bytes(None, {}), "no LEAF file"),
    (read_leaf, leaf_bytes([{}], {}), "no LEAF file"),
    (read_leaf, leaf_bytes([[1]], {}), "no LEAF file"),
    (read_leaf, leaf_bytes(["a"], None), "no LEAF file"),
    (read_leaf, leaf_bytes(["a"], ["a"]), "no LEAF file"),
    (read_leaf, leaf_bytes(["a" * 10_000], {}), "no LEAF file"),
    (read_leaf, leaf_bytes(["a"], {"a": {"x": [[10**400] * 784], "y": [1]}}), "x must be lists "
                                                                              "of 784 numbers"),
    (read_leaf, leaf_bytes(["a"], {"a": {"x": [PIXELS], "y": [[1]]}}), "labels must be a list "
                                                                       "of integers"),
    (read_leaf, b'{"users": [' + b"9" * 5000 + b"]}", "damaged json"),
    (read_leaf, b'{"users": ' + b"[" * 100_000, "damaged json (maximum recursion depth"),
    (read_pictures, parquet_bytes(image=[{"bytes": 3}], label=[1]), "pictures must be stored "
                                                                    "as bytes, not as int64"),
    (read_pictures, parquet_bytes(image=[{"bytes": [1]}], label=[1]), "pictures must be stored "
                                                                      "as bytes, not as list"),
    (read_pictures, parquet_bytes(image=[{"bytes": "a"}], label=[1]), "pictures must be stored "
                                                                      "as bytes, not as string"),
    (read_pictures, parquet_bytes(image=[bytes(1 << 22)] * 40, label=[1] * 40), "GiB of memory"),
    (read_pictures, parquet_bytes(image=[picture_bytes(700, 700)], label=[1]), "row 0: takes "
                                                                               "0.00 GiB of "
                                                                               "memory"),
    (read_pictures, parquet_bytes(image=[picture_bytes(400, 400)] * 100, label=[1] * 100), "takes 0.01 GiB of memory"),
    (read_batch, pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": NESTED}), "1 "
                                                                                          "inputs but 0 labels"),
    (read_batch, pickle.dumps({"data": bytes(3072), "labels": [1 << 40_000]}), "labels must be "
                                                                               "a list of "
                                                                               "integers"),
    (read_batch, b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little"), "damaged pickle"),
    (read_texts, b'"' + b"9" * 200_000 + b'","a","b"\n', "damaged csv"),
]  # fmt: skip


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.01")


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize(
    ("read", "content", "message"), HOSTILE, ids=[message[:40] for _, _, message in HOSTILE]
)
def test_a_hostile_file_is_refused_in_one_line_and_little_memory(
    read: Callable[[Path], Any], content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=re.escape(message)) as caught:
            read(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 3 * len(content) + (1 << 25)
    finally:
        tracemalloc.stop()
    assert str(tmp_path / "file") in str(caught.value)
    require_one_short_line(str(caught.value))


def test_a_picture_of_169_megapixels_is_refused_before_it_is_decoded(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    (tmp_path / "large.png").write_bytes(picture_bytes(13_000, 13_000))
    with pytest.raises(
        DataError,
        match=r"large.png: takes 0.63 GiB of memory, more than the 0.25 GiB that it may take",
    ):
        read_files([tmp_path / "large.png"], 1, size=(32, 32))
    with pytest.raises(DataError, match=r"takes 27.94 GiB of memory, more than the 4.00 GiB"):
        read_files([tmp_path / "large.png"], 3, size=(100_000, 100_000))
    assert not recwarn.list


def test_refusals_state_the_memory_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(idx_bytes([1 << 20], bytes(1 << 20)))
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.0009")
    with pytest.raises(DataError, match="set FEDLOOM_DATA_GIB to more than 0"):
        read_idx(tmp_path / "file")
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.001")
    assert len(read_idx(tmp_path / "file")) == 1 << 20
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "much")
    with pytest.raises(
        DataError, match="FEDLOOM_DATA_GIB must be a number of GiB greater than 0, not 'much'"
    ):
        read_idx(tmp_path / "file")


@pytest.mark.parametrize(
    "expression",
    ["synthetic(dimension=1000000000)", "synthetic(users=1000000000)", "synthetic(classes=1000000000)",
     "synthetic_feddc(samples=1000000000)", "synthetic_feddc(users=1000000, dimension=1000000)"],
)  # fmt: skip
def test_synthetic_data_that_fit_no_memory_are_refused_with_what_they_would_take(
    expression: str,
) -> None:
    with pytest.raises(
        DataError, match=r"synthetic\w*: takes [\d,]+\.\d\d GiB of memory, more than the 4.00 GiB"
    ):
        datasets.build(expression)


@pytest.mark.parametrize(
    "metadata", ["[" * 100_000, "3", '{"model": 3}', "9" * 5000, '{"a": ' * 3000, "nan"]
)
def test_bad_metadata_are_damage(metadata: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(model_bytes(metadata))
    with pytest.raises(CheckpointError, match=r"model.safetensors") as caught:
        load_model(tmp_path / "model.safetensors")
    require_one_short_line(str(caught.value))


# Valid files. The tests change a few of their bytes.
WHOLE: list[tuple[Callable[[Path], Any], bytes]] = [
    (read_arrays, npz_bytes(header("(64,)"))),
    (read_idx, idx_bytes([3, 2], bytes(6))),
    (read_idx, gzip.compress(idx_bytes([3, 2], bytes(6)))),
    (read_leaf, leaf_bytes(["a"], {"a": {"x": [[0] * 784], "y": [1]}})),
    (
        read_pictures,
        parquet_bytes(image=[{"bytes": picture_bytes(8, 8), "path": "a"}] * 3, label=[1, 2, 3]),
    ),
    (read_batch, pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]})),
    (
        read_batch,
        pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}, protocol=2),
    ),
    (lambda path: read_files([path], 3), picture_bytes(8, 8)),
    (read_texts, b'"1","title","text, with ""quotes"""\n'),
    (
        load_model,
        model_bytes('{"model": "logistic", "shape": "64", "classes": "10", "vocabulary": ""}'),
    ),
    (
        read_table,
        b'algorithm = "fedavg"\nseeds = [0, 1]\n[data]\nname = "digits"\nlocal_test = 0.25\n',
    ),
]


@pytest.mark.usefixtures("small_memory")
@pytest.mark.parametrize(("read", "content"), WHOLE, ids=map(str, range(len(WHOLE))))
@settings(deadline=10_000, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_file_is_read_or_refused_in_one_short_line(
    read: Callable[[Path], Any],
    content: bytes,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    changed = bytearray(content)
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.binary(max_size=4)), max_size=3)
    ):
        changed[at : at + len(value)] = value
    path = tmp_path_factory.getbasetemp() / "changed"
    path.write_bytes(
        changed[
            : data.draw(
                st.sampled_from(
                    [len(content), len(content), data.draw(st.integers(0, len(content)))]
                )
            )
        ]
    )
    try:
        read(path)
    except FedloomError as error:
        require_one_short_line(str(error))


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.just([PIXELS]),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y", "a"]), inside, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=10_000, suppress_health_check=list(HealthCheck))
@given(
    users=_JSON | st.lists(st.sampled_from(["a", "x"])),
    data=_JSON | st.fixed_dictionaries({"a": st.fixed_dictionaries({"x": _JSON, "y": _JSON})}),
)
def test_any_json_is_read_or_refused_in_one_short_line(
    users: Any, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "users.json"
    path.write_bytes(leaf_bytes(users, data))
    try:
        read_leaf(path)
    except DataError as error:
        require_one_short_line(str(error))
