"""Small files that expand to much memory or time are refused in one line, before they expand."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from fedloom.common.errors import CheckpointError, DataError, FedloomError
from fedloom.data import DataSpec
from fedloom.data.formats.arrow import read_any
from fedloom.data.formats.limits import MOST_COLUMNS
from fedloom.models import models
from fedloom.models.build import build_model
from fedloom.serving.artifact import load_model, save_model
from fedloom.state.tensors import read_tensors, write_tensors

MIB = 1 << 20
SPECS = (
    DataSpec((3, 32, 32), 10),
    DataSpec((1, 28, 28), 10),
    DataSpec((64,), 10),
    DataSpec((20,), 30, 30),
    DataSpec((20,), 4, 30),
)


def highest_memory() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def dictionary(rows: int, length: int) -> pa.Array:
    index = pa.array(np.zeros(rows, np.int32))
    return pa.DictionaryArray.from_arrays(index, pa.array(["x" * length]))


@pytest.mark.parametrize("store_schema", [True, False])
@pytest.mark.parametrize(("rows", "length"), [(200_000, 4096), (2000, 400_000)])
def test_a_dictionary_counts_with_the_text_of_each_row(
    rows: int, length: int, store_schema: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"a": dictionary(rows, length), "y": np.zeros(rows, np.int32)})
    path = tmp_path / "bomb.parquet"
    parquet.write_table(
        table,
        path,
        compression="zstd",
        store_schema=store_schema,
        dictionary_pagesize_limit=64 * MIB,
    )
    assert path.stat().st_size < MIB
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.1")
    before = highest_memory()
    with pytest.raises(DataError, match=r"GiB of memory, more than the 0\.10 GiB"):
        read_any(path)
    assert highest_memory() - before < 500 * MIB
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "8")
    parquet.write_table(table.slice(0, 500), path)
    assert read_any(path)[0].num_rows == 500


def test_a_dictionary_with_indices_outside_is_damaged(tmp_path: Path) -> None:
    wild = pa.Array.from_buffers(
        pa.int32(), 2, [None, pa.py_buffer(np.array([0, 1 << 30], np.int32).tobytes())]
    )
    broken = pa.DictionaryArray.from_arrays(wild, pa.array(["a", "b"]), safe=False)
    folder = tmp_path / "saved"
    folder.mkdir()
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file:
        table = pa.table({"a": broken, "y": [1, 2]})
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pytest.raises(DataError, match="damaged"):
        read_any(folder)


def test_a_file_is_named_once(tmp_path: Path) -> None:
    table = pa.table({"a": [1.0, 2.0], "y": [0, 1]})
    with (
        pa.OSFile(str(tmp_path / "data.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    state = {"_data_files": [{"filename": "data.arrow"}] * 4000}
    (tmp_path / "state.json").write_text(json.dumps(state))
    started = time.monotonic()
    with pytest.raises(DataError, match="names a file twice"):
        read_any(tmp_path)
    assert time.monotonic() - started < 5
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": state["_data_files"][:1]}))
    assert read_any(tmp_path)[0].num_rows == 2


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet"])
def test_a_table_has_a_bounded_number_of_columns(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"wide.{suffix}"
    names = [f"c{k}" for k in range(MOST_COLUMNS + 1)]
    if suffix == "parquet":
        parquet.write_table(pa.table({name: [1.0] for name in names}), path)
    else:
        mark = "," if suffix == "csv" else "\t"
        path.write_text(f"{mark.join(names)}\n{mark.join(['1'] * len(names))}\n")
    started = time.monotonic()
    with pytest.raises(DataError, match="20,001 columns, more than the 20,000 of a table"):
        read_any(path)
    assert time.monotonic() - started < 20


def file_of(path: Path, model: str, spec: DataSpec) -> Path:
    save_model(path, build_model(model, spec, 0), model, spec, {})
    return path


@pytest.mark.parametrize(
    "claim",
    [
        {"model": "mlp(hidden=[50000000])"}, {"model": f"mlp(hidden={[1] * 40_000})"},
        {"model": "mlp(hidden=[8])", "classes": "80000000"}, {"model": "mlp(hidden=[8])", "shape": "80000000"},
        {"model": "transformer(layers=100000000, width=8, heads=2)", "shape": "20", "vocabulary": "30"},
    ],
)  # fmt: skip
def test_a_model_file_that_names_a_larger_model_is_refused_without_its_memory(
    claim: dict[str, str], tmp_path: Path
) -> None:
    path = file_of(tmp_path / "model.safetensors", "mlp(hidden=[8])", DataSpec((4,), 3))
    tensors, metadata = read_tensors(path)
    write_tensors(path, tensors, metadata | claim)
    before, started = highest_memory(), time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert highest_memory() - before < 100 * MIB
    assert time.monotonic() - started < 20
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_every_model_has_its_shapes_without_memory_and_is_loaded(tmp_path: Path) -> None:
    tried = set()
    for name in (entry.name for entry in models):
        for spec in SPECS:
            try:
                module = build_model(name, spec, 0)
            except FedloomError:
                continue
            if sum(p.numel() for p in module.parameters()) > 3_000_000:
                continue
            state = torch.random.get_rng_state()
            loaded = load_model(file_of(tmp_path / "model.safetensors", name, spec))
            assert torch.equal(torch.random.get_rng_state(), state)
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    module.state_dict().values(), loaded.state_dict().values(), strict=True
                )
            )
            tried.add(name)
    assert {"mlp", "logistic", "digits_cnn", "transformer", "recurrent"} <= tried
