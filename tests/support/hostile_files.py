"""Small data sets in every supported format, for tests that damage their files."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from damage import damages, mutated
from data_support import idx_bytes, picture
from fedloom.data.dataset import datasets

MNIST = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
BATCHES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")


def grey(side: int, form: str = "PNG", value: int = 100) -> bytes:
    """Return the file of a grey picture."""
    return picture(np.full((side, side), value, np.uint8), form)


def saved(folder: Path, table: pa.Table) -> None:
    """Write a folder as `save_to_disk` of Hugging Face's `datasets` does."""
    folder.mkdir(parents=True)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as s,
    ):
        s.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]})
    )
    (folder / "dataset_info.json").write_text("{}")


def patients(rows: int = 12) -> pa.Table:
    """Return a table with columns of several types."""
    return pa.table({
        "age": [20 + row for row in range(rows)],
        "pressure": [None if row == 3 else 100 + 0.5 * row for row in range(rows)],
        "ward": [("north", "süd")[row % 2] for row in range(rows)],
        "smoker": [row % 3 == 0 for row in range(rows)],
        "hospital": [f"h{row % 3}" for row in range(rows)],
        "outcome": [("ill", "well")[row % 2] for row in range(rows)],
    })  # fmt: skip


PATIENTS = "target=outcome, group=hospital, missing=mean"


def _csv(folder: Path) -> str:
    csv.write_csv(patients(), folder / "patients.csv")
    return f"table(path='{folder}/patients.csv', {PATIENTS})"


def _parquet(folder: Path) -> str:
    pq.write_table(patients(), folder / "patients.parquet", compression="zstd")
    return f"table(path='{folder}/patients.parquet', {PATIENTS})"


def _saved(folder: Path) -> str:
    saved(folder / "patients", patients())
    return f"table(path='{folder}/patients', {PATIENTS})"


def _saved_pictures(folder: Path) -> str:
    for split in ("train", "test"):
        cells = [{"bytes": grey(4, value=row), "path": "a.png"} for row in range(6)]
        saved(folder / "pictures" / split, pa.table({"image": cells, "label": [0, 1, 2] * 2}))
    (folder / "pictures" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return f"table(path='{folder}/pictures')"


def _mnist(folder: Path) -> str:
    for name, rows in zip(MNIST, (8, 8, 4, 4), strict=True):
        content = idx_bytes(
            np.arange(rows * 16).reshape(rows, 4, 4) % 256 if "images" in name else np.arange(rows)
        )
        packed = name.startswith("t10k")
        (folder / f"{name}{'.gz' if packed else ''}").write_bytes(
            gzip.compress(content) if packed else content
        )
    return f"mnist(folder='{folder}')"


def _mnist_parquet(folder: Path) -> str:
    for split in ("train", "test"):
        cells = [{"bytes": grey(4), "path": None} for _ in range(4)]
        pq.write_table(
            pa.table({"image": cells, "label": range(4)}), folder / f"{split}-00000.parquet"
        )
    return f"mnist(folder='{folder}')"


def _cifar10(folder: Path) -> str:
    for protocol, name in enumerate(BATCHES):
        batch = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1], "batch_label": "of 5"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=protocol % 6))
    return f"cifar10(folder='{folder}')"


def _cifar100(folder: Path) -> str:
    for name in ("train", "test"):
        batch = {"data": bytes(3 * 3072), "fine_labels": [0, 1, 99], "coarse_labels": [0, 1, 19]}
        (folder / name).write_bytes(pickle.dumps(batch))
    return f"cifar100(folder='{folder}')"


def _femnist(folder: Path) -> str:
    (folder / "all_data").mkdir()
    users = {
        "a": {"x": [[0.25] * 784] * 4, "y": [0, 1, 2, 3]},
        "b": {"x": [[1] * 784] * 3, "y": [1, 1, 1]},
    }
    content = {"users": list(users), "num_samples": [4, 3], "user_data": users}
    (folder / "all_data" / "all_data_0.json").write_text(json.dumps(content))
    return f"femnist(folder='{folder}', fraction=1.0, least=2)"


def _shakespeare(folder: Path) -> str:
    users = {"ROMEO": {"x": ["But soft! W", "hat light t"], "y": ["h", "h"]}}
    for split in ("train", "test"):
        (folder / split).mkdir()
        content = {"users": list(users), "num_samples": [2], "user_data": users}
        (folder / split / "all.json").write_text(json.dumps(content))
    return f"shakespeare(folder='{folder}', length=8)"


def _plays(folder: Path) -> str:
    (folder / "romeo.txt").write_text(
        "ROMEO:\nBut soft! What light\n\nJULIET:\nO Romeo, Romeo! Wherefore\n" * 3
    )
    return f"shakespeare(folder='{folder}', length=8)"


def _posts(folder: Path) -> str:
    lines = [json.dumps({"user": user, "texts": ["how do i", "it's done"]}) for user in (1, "2")]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return f"stackoverflow(folder='{folder}', length=5)"


def _news(folder: Path) -> str:
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text(
            '"3","Wall St. Bears","Short-sellers, \\ are seeing green"\n' * 3
        )
    return f"ag_news(folder='{folder}', length=5)"


def _tiny(folder: Path) -> str:
    (folder / "wnids.txt").write_text("n01\nn02\n")
    for wnid in ("n01", "n02"):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        for k in range(2):
            (images / f"{k}.JPEG").write_bytes(grey(8, "JPEG"))
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "val" / "images" / "v.JPEG").write_bytes(grey(8, "JPEG"))
    (folder / "val" / "val_annotations.txt").write_text("v.JPEG\tn02\t0\t0\t1\t1\n")
    return f"tiny_imagenet(folder='{folder}')"


def _images(folder: Path) -> str:
    for name, kinds in (("ant", ("PNG", "GIF", "TIFF")), ("bee", ("BMP", "WEBP", "PPM"))):
        (folder / "all" / name).mkdir(parents=True)
        for kind in kinds:
            (folder / "all" / name / f"{kind}.{kind.lower()}").write_bytes(grey(5, kind))
    return f"images(folder='{folder}/all', channels=1)"


def _npz(folder: Path) -> str:
    arrays = {
        "inputs": np.zeros((6, 3), np.float32),
        "labels": np.arange(6) % 2,
        "groups": np.array(list("aabbcc")),
    }
    np.savez_compressed(folder / "own.npz", **arrays)
    return f"arrays(path='{folder}/own.npz')"


def _npy(folder: Path) -> str:
    (folder / "own").mkdir()
    np.save(folder / "own" / "inputs.npy", np.zeros((6, 1, 4, 4), np.uint8))
    np.save(folder / "own" / "labels.npy", np.arange(6) % 2)
    return f"arrays(path='{folder}/own')"


WRITERS: dict[str, Callable[[Path], str]] = {
    "csv": _csv, "parquet": _parquet, "save_to_disk": _saved, "pictures of save_to_disk": _saved_pictures, "idx": _mnist,
    "pictures in parquet": _mnist_parquet, "pickle": _cifar10, "pickle of bytes": _cifar100, "leaf images": _femnist,
    "leaf texts": _shakespeare, "plays": _plays, "json lines": _posts, "csv of texts": _news, "tiny imagenet": _tiny,
    "pictures": _images, "npz": _npz, "npy": _npy,
}  # fmt: skip


class Sets:
    """Write one data set in each format, each in its own folder below `root`.

    Tests damage copies of the files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.expressions: dict[str, str] = {}
        for name, write in WRITERS.items():
            folder = root / name.replace(" ", "-")
            folder.mkdir(parents=True)
            self.expressions[name] = write(folder)
            datasets.build(self.expressions[name])  # the undamaged sets can be read

    def files(self, name: str) -> list[Path]:
        """Return the files of a set, relative to its folder."""
        folder = self.root / name.replace(" ", "-")
        return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())

    def content(self, name: str, file: Path) -> bytes:
        """Return the content of a file of a set."""
        return (self.root / name.replace(" ", "-") / file).read_bytes()

    def build(self, name: str, file: Path, content: bytes | Callable[[Path], object]) -> Any:
        """Read a set with other content in one file, or with another kind of entry at its path."""
        folder, copy = self.root / name.replace(" ", "-"), self.root / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        if isinstance(content, bytes):
            (copy / file).write_bytes(content)
        else:
            (copy / file).unlink()
            content(copy / file)
        return datasets.build(self.expressions[name].replace(str(folder), str(copy)))


def changed(content: bytes, draw: random.Random) -> bytes:
    """Return the content with disk damage, or with hostile bytes."""
    if draw.random() < 0.5 or not content:
        return mutated(content, draw)
    ((_, damaged),) = damages(content, 1, draw.randrange(1 << 30))
    return damaged
