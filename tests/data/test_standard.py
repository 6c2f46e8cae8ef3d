"""Standard data sets from the real files, if present, and from small files in the same formats."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import pickle
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data_support import idx_bytes, make, picture, random_pixels
from fedloom.common.errors import DataError, FedloomError, InvalidValue, MissingExtra
from fedloom.data.dataset import Dataset, datasets
from fedloom.data.sets.femnist import take_writers

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
MNIST = pytest.mark.skipif(not (SHARED / "MNIST").is_dir(), reason="needs the real MNIST files")
CIFAR = pytest.mark.skipif(
    not (SHARED / "cifar10-jpeg").is_dir(), reason="needs the CIFAR-10 parquet files"
)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolate tests from the user's data, the user's cache and the hub."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)


def write_idx(path: Path, array: np.ndarray) -> None:
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


# --- the real files ---


@MNIST
def test_the_real_mnist_is_read() -> None:
    data = make("mnist", folder=str(SHARED))
    assert (len(data.train), len(data.test), data.spec.shape) == (60_000, 10_000, (1, 28, 28))
    assert data.train.labels.bincount().tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    assert data.test.labels.bincount().tolist() == [
        980,
        1135,
        1032,
        1010,
        982,
        892,
        958,
        1028,
        974,
        1009,
    ]
    assert data.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    # the official uncompressed training images have this header and this md5
    header = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in (60_000, 28, 28))
    assert (
        hashlib.md5(header + data.train.inputs.numpy().tobytes()).hexdigest().startswith("6bbc9ace")
    )
    prepared = data.prepare(data.train.inputs[:20_000])
    assert abs(float(prepared.mean())) < 0.01
    assert abs(float(prepared.std()) - 1) < 0.01


@CIFAR
def test_real_cifar10_from_parquet_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Use a sixth of the real pictures to shorten the test.
    source = pq.read_table(SHARED / "cifar10-jpeg" / "test.parquet")
    pq.write_table(source, tmp_path / "train.parquet")
    pq.write_table(source.slice(0, 500), tmp_path / "test.parquet")
    data = make("cifar10", folder=str(tmp_path))
    assert (len(data.train), data.spec.shape, data.classes) == (10_000, (3, 32, 32), 10)
    assert data.train.labels.bincount().tolist() == [1000] * 10
    row = source.slice(123, 1).to_pylist()[0]
    expected = np.asarray(Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB")).transpose(
        2, 0, 1
    )
    assert np.array_equal(data.train.inputs[123].numpy(), expected)
    folder_of_picture = row["img"]["path"].split("/")[0]
    assert data.class_names is not None
    assert data.class_names[data.train.labels[123]] == folder_of_picture
    mean = data.train.inputs.double().mean((0, 2, 3)) / 255
    assert torch.allclose(mean, torch.tensor([0.491, 0.482, 0.447], dtype=torch.double), atol=0.01)

    def decode_again(*_: object, **__: object) -> None:
        raise AssertionError("decoded twice")

    monkeypatch.setattr("fedloom.data.sets.picture_sets.image_samples", decode_again)
    assert torch.equal(make("cifar10", folder=str(tmp_path)).train.inputs, data.train.inputs)


# --- idx sets ---


def _write_mnist(folder: Path, suffix: str = "", classes: int = 10) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = random_pixels(30, 28, 28)
    for split, some in (("train", images[:20]), ("t10k", images[20:])):
        write_idx(folder / f"{split}-images-idx3-ubyte{suffix}", some)
        write_idx(
            folder / f"{split}-labels-idx1-ubyte{suffix}",
            (np.arange(len(some)) % classes).astype(np.uint8),
        )
    return images


@pytest.mark.parametrize("layout", ["", "raw", "MNIST/raw", "mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_found_in_the_usual_layouts(layout: str, suffix: str, tmp_path: Path) -> None:
    images = _write_mnist(tmp_path / "data" / layout, suffix)
    data = make("mnist", folder=str(tmp_path / "data"))
    assert np.array_equal(data.train.inputs.numpy()[:, 0], images[:20])
    assert data.test.labels.tolist() == list(range(10))


def test_a_shared_data_folder_distinguishes_sets_of_equal_file_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "all"))
    _write_mnist(tmp_path / "all" / "MNIST" / "raw")
    assert len(make("mnist").train) == 20
    with pytest.raises(DataError, match="fashion_mnist: not in"):
        make("fashion_mnist")
    # A MNIST folder does not serve Fashion-MNIST, although the file names are equal.
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "all" / "MNIST" / "raw"))
    assert len(make("mnist").train) == 20
    with pytest.raises(DataError, match="fashion_mnist: not in"):
        make("fashion_mnist")
    _write_mnist(tmp_path / "all" / "FashionMNIST" / "raw")
    assert make("fashion_mnist", folder=str(tmp_path / "all")).class_names[-1] == "ankle boot"  # type: ignore[index]


@pytest.mark.parametrize(
    ("choice", "scale"), [("standard", (0.1307, 0.3081)), ("half", (0.5, 0.5)), ("none", (0, 1))]
)
def test_normalise_subtracts_and_divides(
    choice: str, scale: tuple[float, float], tmp_path: Path
) -> None:
    _write_mnist(tmp_path)
    data = make("mnist", folder=str(tmp_path), normalise=choice)
    expected = (data.train.inputs.double() / 255 - scale[0]) / scale[1]
    assert torch.allclose(data.prepare(data.train.inputs).double(), expected, atol=1e-6)


def test_bad_idx_sets_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"normalise must be .* did you mean 'half'"):
        make("mnist", folder=str(tmp_path / "absent"), normalise="haf")
    with pytest.raises(DataError, match="absent: no such folder"):
        make("mnist", folder=str(tmp_path / "absent"))
    with pytest.raises(
        DataError, match=r"mnist: no folder given .* put train-images-idx3-ubyte\[.gz\]"
    ) as caught:
        make("mnist")
    assert "\n" not in str(caught.value)
    _write_mnist(tmp_path, classes=11)
    with pytest.raises(
        DataError, match=r"train-labels-idx1-ubyte: label 10 in row 10 is outside 0\.\.9"
    ):
        make("mnist", folder=str(tmp_path))
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte: missing"):
        make("mnist", folder=str(tmp_path))
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.zeros(9, np.uint8))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(20, np.uint8))
    with pytest.raises(DataError, match="t10k-images-idx3-ubyte: 10 inputs but 9 labels"):
        make("mnist", folder=str(tmp_path))


def _write_emnist(folder: Path, kind: str, labels: np.ndarray) -> np.ndarray:
    folder.mkdir(parents=True)
    images = random_pixels(len(labels), 28, 28)
    for split in ("train", "test"):
        write_idx(folder / f"emnist-{kind}-{split}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"emnist-{kind}-{split}-labels-idx1-ubyte.gz", labels.astype(np.uint8))
    return images


def test_emnist_letters_are_upright_and_shifted(tmp_path: Path) -> None:
    labels = np.tile(np.arange(1, 27), 3)
    images = _write_emnist(tmp_path / "EMNIST" / "raw", "letters", labels)
    data = make("emnist_letters", folder=str(tmp_path))
    assert (data.classes, data.train.labels.tolist()) == (26, (labels - 1).tolist())
    assert np.array_equal(data.train.inputs[5, 0].numpy(), images[5].T)
    first_ten = make("emnist_l", folder=str(tmp_path))
    assert set(first_ten.train.labels.tolist()) == set(range(10))
    assert (len(first_ten.train), first_ten.classes) == (30, 10)
    prepared = first_ten.prepare(first_ten.train.inputs).double()
    assert abs(float(prepared.mean())) < 1e-5
    assert abs(float(prepared.std(correction=0)) - 1) < 1e-5


def test_emnist_balanced_has_47_classes(tmp_path: Path) -> None:
    _write_emnist(tmp_path / "gzip", "balanced", np.arange(47))
    data = make("emnist_balanced", folder=str(tmp_path))
    assert data.class_names is not None
    assert (data.classes, len(data.class_names), len(set(data.class_names))) == (47, 47, 47)
    assert data.train.labels.tolist() == list(range(47))


# --- CIFAR ---


def test_cifar10_is_read_from_python_batches(tmp_path: Path) -> None:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for at, name in enumerate(names):
        data, labels = random_pixels(4, 3072, seed=at), np.arange(4) + at
        (folder / name).write_bytes(
            pickle.dumps({b"data": data, b"labels": labels.tolist()}, protocol=2)
        )
    dataset = make("cifar10", folder=str(tmp_path))
    assert (len(dataset.train), len(dataset.test)) == (20, 4)
    assert dataset.train.labels[:8].tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert np.array_equal(
        dataset.test.inputs.numpy().reshape(4, 3072), random_pixels(4, 3072, seed=5)
    )
    (folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3: missing"):
        make("cifar10", folder=str(tmp_path))


def test_cifar100_fine_and_coarse_agree_over_formats(tmp_path: Path) -> None:
    fine, coarse = np.array([99, 3, 50]), np.array([19, 0, 7])
    images = random_pixels(3, 3072)
    folders = {form: tmp_path / form for form in ("cifar-100-python", "parquet")}
    for folder in folders.values():
        folder.mkdir()
    rows = [
        {"bytes": picture(image.reshape(3, 32, 32).transpose(1, 2, 0)), "path": None}
        for image in images
    ]
    for split in ("train", "test"):
        batch = {"data": images, "fine_labels": fine.tolist(), "coarse_labels": coarse.tolist()}
        (folders["cifar-100-python"] / split).write_bytes(pickle.dumps(batch, protocol=2))
        table = pa.table({"img": rows, "fine_label": fine, "coarse_label": coarse})
        pq.write_table(table, folders["parquet"] / f"{split}-00000-of-00001.parquet")
    for folder in folders.values():
        for name, labels in (("cifar100", fine), ("cifar100_coarse", coarse)):
            data = make(name, folder=str(folder))
            assert data.train.labels.tolist() == labels.tolist()
            assert np.array_equal(data.test.inputs.numpy().reshape(3, 3072), images)
    assert make("cifar100", folder=str(folders["parquet"])).classes == 100
    assert make("cifar100_coarse", folder=str(folders["parquet"])).classes == 20


# --- Tiny ImageNet ---


def _write_tiny(root: Path) -> dict[str, np.ndarray]:
    wnids = ["n03", "n01", "n02"]
    root.mkdir()
    (root / "wnids.txt").write_text("\n".join(wnids) + "\n")
    first_images: dict[str, np.ndarray] = {}
    for at, wnid in enumerate(wnids):
        folder = root / "train" / wnid / "images"
        folder.mkdir(parents=True)
        for number in range(10):
            image = random_pixels(64, 64, 3, seed=100 * at + number)
            (folder / f"{wnid}_{number}.JPEG").write_bytes(picture(image))
            first_images.setdefault(wnid, image)
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for number, wnid in enumerate(wnids):
        (root / "val" / "images" / f"val_{number}.JPEG").write_bytes(
            picture(random_pixels(64, 64, seed=number))
        )
        lines.append(f"val_{number}.JPEG\t{wnid}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    return first_images


def test_tiny_imagenet_is_read_from_its_folder(tmp_path: Path) -> None:
    first_images = _write_tiny(tmp_path / "tiny-imagenet-200")
    data = make("tiny_imagenet", folder=str(tmp_path))
    assert (data.classes, data.spec.shape, len(data.train), len(data.test)) == (
        200,
        (3, 64, 64),
        30,
        3,
    )
    assert data.test.labels.tolist() == [2, 0, 1]  # n03, n01, n02
    assert np.array_equal(
        data.train.inputs[data.train.labels == 1][0].numpy(), first_images["n02"].transpose(2, 0, 1)
    )
    held_out = make("tiny_imagenet", folder=str(tmp_path), test="held_out", test_fraction=0.2)
    assert (
        held_out.train.labels.bincount().tolist(),
        held_out.test.labels.bincount().tolist(),
    ) == ([8] * 3, [2] * 3)


def test_damaged_tiny_imagenet_is_named(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    _write_tiny(root)
    table = root / "val" / "val_annotations.txt"
    good = table.read_text()
    table.write_text(good + "val_9.JPEG\tn77\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match=r"val_annotations.txt: line 4 does not name"):
        make("tiny_imagenet", folder=str(root))
    table.write_text(good.replace("val_1.", "val_8."))
    with pytest.raises(DataError, match=r"val_8.JPEG: cannot be read"):
        make("tiny_imagenet", folder=str(root))
    table.write_text(good)
    (root / "wnids.txt").write_text("n01\nn04\n")
    with pytest.raises(DataError, match=r"wnids.txt: class 'n04' has no folder"):
        make("tiny_imagenet", folder=str(root))


# --- FEMNIST ---


def _leaf(writers: dict[str, int], start: int = 0) -> str:
    """Make a LEAF file that stores a sample's writer and number in its first two pixels."""
    data = {}
    for at, (name, size) in enumerate(writers.items(), start=start):
        images = np.zeros((size, 784))
        images[:, 0], images[:, 1] = at, np.arange(size) % 256
        data[name] = {"x": (images / 255).tolist(), "y": (np.arange(size) % 62).tolist()}
    return json.dumps(
        {"users": list(writers), "num_samples": list(writers.values()), "user_data": data}
    )


def _identity(data: Dataset) -> list[tuple[int, int]]:
    both = data.train.concatenate(data.test)
    return [(int(image[0, 0, 0]), int(image[0, 0, 1])) for image in both.inputs]


def test_take_writers_follows_leaf() -> None:
    sizes = [30, 50, 20, 40, 60]
    taken = take_writers(sizes, 0.5, seed=3, file=0)
    assert sum(count for _, count in taken) == 100
    assert all(count == sizes[position] for position, count in taken[:-1])
    assert len({position for position, _ in taken}) == len(taken)
    assert sorted(take_writers(sizes, 1.0, seed=3, file=0)) == list(enumerate(sizes))
    draws = {
        tuple(take_writers(sizes, 0.5, seed=seed, file=file))
        for seed in range(5)
        for file in range(3)
    }
    assert len(draws) > 5


def test_femnist_samples_and_splits_by_writer(tmp_path: Path) -> None:
    folder = tmp_path / "femnist" / "data" / "all_data"
    folder.mkdir(parents=True)
    sizes = {0: [20, 14, 9, 30], 1: [25, 12, 40]}
    (folder / "all_data_0.json").write_text(
        _leaf({f"a{at}": size for at, size in enumerate(sizes[0])})
    )
    (folder / "all_data_1.json").write_text(
        _leaf({f"b{at}": size for at, size in enumerate(sizes[1])}, start=4)
    )
    options: dict[str, Any] = {
        "folder": str(tmp_path),
        "fraction": 0.6,
        "least": 10,
        "sample_seed": 1,
    }
    data = make("femnist", **options)
    expected: list[tuple[int, int]] = []
    for file, start in ((0, 0), (1, 4)):
        for position, count in take_writers(sizes[file], 0.6, 1, file):
            if count >= 10:
                expected += [(start + position, number) for number in range(count)]
    assert sorted(_identity(data)) == sorted(expected)
    assert data.train.groups is not None
    assert data.test.groups is not None
    for group in set(data.train.groups.tolist()):
        members = (data.train.groups == group, data.test.groups == group)
        assert len({int(v) for v in data.train.inputs[members[0]][:, 0, 0, 0]}) == 1
        total = int(members[0].sum() + members[1].sum())
        assert int(members[0].sum()) == max(1, int(0.9 * total))
    assert torch.equal(
        data.prepare(torch.tensor([[[[0, 255]]]], dtype=torch.uint8)),
        torch.tensor([[[[1.0, -1.0]]]]),
    )
    split_again = make("femnist", **options, split_seed=1)
    assert sorted(_identity(split_again)) == sorted(expected)
    assert not torch.equal(split_again.test.inputs, data.test.inputs)
    with pytest.raises(DataError, match="no writer has 500 samples"):
        make("femnist", **{**options, "least": 500})


def test_femnist_takes_a_preprocessed_folder_as_it_is(tmp_path: Path) -> None:
    for split, writers in (("train", {"x": 5, "y": 3}), ("test", {"y": 2, "x": 1})):
        (tmp_path / split).mkdir()
        (tmp_path / split / "all_data_0_niid_05_keep_100.json").write_text(_leaf(writers))
    data = make("femnist", folder=str(tmp_path))
    assert data.train.groups is not None
    assert data.test.groups is not None
    assert data.train.groups.tolist() == [0] * 5 + [1] * 3
    assert data.test.groups.tolist() == [1, 1, 0]
    with pytest.raises(DataError, match="femnist: not in"):
        make("femnist", folder=str(tmp_path), preprocessed=False)
    with pytest.raises(InvalidValue, match=r"fraction must be in \(0, 1\], not 0.0"):
        make("femnist", folder=str(tmp_path), fraction=0.0)


# --- AG News ---


def test_ag_news_numbers_its_tokens(tmp_path: Path) -> None:
    rows = {
        "train": [
            ("3", "Oil", "Oil, oil falls."),
            ("1", "Talks", "Peace talks fall"),
            ("2", "Cup", "Oil cup"),
        ],
        "test": [("4", "Chips", "Oil chips")],
    }
    for split, lines in rows.items():
        with (tmp_path / f"{split}.csv").open("w", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(lines)
    data = make("ag_news", folder=str(tmp_path), length=6)
    # oil 4, cup 2, talks 2, then one each in alphabetical order: ",", ".", fall, falls, peace
    numbers = {"oil": 2, "cup": 3, "talks": 4, ",": 5, ".": 6, "fall": 7, "falls": 8, "peace": 9}
    assert data.vocabulary == len(numbers) + 2
    assert data.train.inputs[0].tolist() == [
        numbers[t] for t in ("oil", "oil", ",", "oil", "falls", ".")
    ]
    assert data.train.inputs[1].tolist() == [
        numbers[t] for t in ("talks", "peace", "talks", "fall")
    ] + [0, 0]
    assert data.test.inputs.tolist() == [[1, 2, 1, 0, 0, 0]]
    assert data.train.labels.tolist() == [2, 0, 1]
    assert data.train.inputs.dtype == torch.int64
    assert make("ag_news", folder=str(tmp_path), max_vocabulary=4).vocabulary == 4
    assert (
        make("ag_news", folder=str(tmp_path), vocabulary_from="all").vocabulary == len(numbers) + 3
    )
    with pytest.raises(InvalidValue, match="did you mean 'train'"):
        make("ag_news", folder=str(tmp_path), vocabulary_from="trian")
    (tmp_path / "test.csv").write_text('"5","a","b"\n')
    with pytest.raises(DataError, match=r"test.csv: label 4 in row 0 is outside 0\.\.3"):
        make("ag_news", folder=str(tmp_path))
    (tmp_path / "test.csv").write_text('"one","a","b"\n')
    with pytest.raises(DataError, match=r"test.csv: the first cell"):
        make("ag_news", folder=str(tmp_path))


# --- the hub ---


def _fake_hub(
    monkeypatch: pytest.MonkeyPatch, tables: dict[tuple[str, str], pa.Table]
) -> list[tuple[str, str]]:
    """Install a `datasets` module that serves `tables` by (repository, split), and return the list
    of its calls.
    """
    calls: list[tuple[str, str]] = []

    def load_dataset(path: str, *, split: str) -> Any:
        calls.append((path, split))
        if (path, split) not in tables:
            raise ConnectionError(f"cannot reach\n{path}")
        formatted = {"arrow": tables[path, split]}
        return SimpleNamespace(with_format=lambda kind: formatted[kind])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def _pictures(count: int, *shape: int) -> list[dict[str, object]]:
    return [
        {"bytes": picture(random_pixels(*shape, seed=at)), "path": f"{at}.png"}
        for at in range(count)
    ]


def test_the_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"image": _pictures(5, 28, 28), "label": [4, 3, 2, 1, 0]})
    calls = _fake_hub(
        monkeypatch, {("ylecun/mnist", "train"): table, ("ylecun/mnist", "test"): table.slice(3)}
    )
    data = make("mnist", hub=True)
    assert calls == [("ylecun/mnist", "train"), ("ylecun/mnist", "test")]
    assert np.array_equal(data.train.inputs[2, 0].numpy(), random_pixels(28, 28, seed=2))
    assert data.test.labels.tolist() == [1, 0]
    repeated = make("mnist", hub=True)
    assert len(calls) == 2
    assert torch.equal(repeated.train.inputs, data.train.inputs)


def test_the_hub_serves_the_other_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = _pictures(4, 32, 32, 3)
    cifar = pa.table(
        {
            "img": colour,
            "label": [0, 9, 1, 2],
            "fine_label": [99, 0, 1, 2],
            "coarse_label": [19, 0, 1, 2],
        }
    )
    tiny = pa.table({"image": _pictures(2, 64, 64, 3), "label": [199, 0]})
    news = pa.table({"text": ["Oil falls", "Peace, talks"], "label": [2, 0]})
    tables = {
        (repository, split): table
        for repository, table, splits in (
            ("uoft-cs/cifar10", cifar, ("train", "test")),
            ("uoft-cs/cifar100", cifar, ("train", "test")),
            ("zh-plus/tiny-imagenet", tiny, ("train", "valid")),
            ("fancyzhx/ag_news", news, ("train", "test")),
        )
        for split in splits
    }
    _fake_hub(monkeypatch, tables)
    assert make("cifar10", hub=True).train.labels.tolist() == [0, 9, 1, 2]
    assert make("cifar100", hub=True).train.labels.tolist() == [99, 0, 1, 2]
    assert make("cifar100_coarse", hub=True).train.labels.tolist() == [19, 0, 1, 2]
    assert make("tiny_imagenet", hub=True).test.labels.tolist() == [199, 0]
    assert make("ag_news", hub=True, length=3).train.inputs.tolist() == [[4, 3, 0], [5, 2, 6]]


def test_the_hub_serves_femnist_by_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    writers = ["w1"] * 6 + ["w0"] * 4 + ["w1"] * 2
    table = pa.table(
        {"image": _pictures(12, 28, 28), "writer_id": writers, "character": list(range(50, 62))}
    )
    _fake_hub(monkeypatch, {("flwrlabs/femnist", "train"): table})
    data = make("femnist", hub=True, fraction=1.0, least=2, test_fraction=0.25)
    both = data.train.concatenate(data.test)
    assert both.groups is not None
    for image, label, group in zip(both.inputs, both.labels, both.groups, strict=True):
        row = int(label) - 50
        assert np.array_equal(image[0].numpy(), random_pixels(28, 28, seed=row))
        assert int((both.groups == group).sum()) == writers.count(writers[row])


def test_the_hub_is_asked_only_without_local_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(MissingExtra, match=r"pip install -e '.\[hub\]'"):
        make("mnist", hub=True)
    calls = _fake_hub(monkeypatch, {})
    with pytest.raises(DataError, match="mnist: not in"):
        make("mnist", folder=str(tmp_path))
    with pytest.raises(DataError, match="mnist: no folder given"):
        make("mnist")
    assert calls == []
    _write_mnist(tmp_path)
    make("mnist", folder=str(tmp_path), hub=True)
    assert calls == []
    with pytest.raises(
        DataError, match="hub data set 'ylecun/mnist', split 'train': cannot be loaded"
    ) as caught:
        make("mnist", hub=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [entry.name for entry in datasets])
def test_every_set_needs_no_arguments_or_names_the_missing_ones(name: str) -> None:
    entry = datasets[name]
    assert len(entry.summary) > 20
    assert all(parameter.default is not parameter.empty for parameter in entry.parameters.values())
    if name in (
        "digits",
        "wine",
        "breast_cancer",
        "diabetes",
        "synthetic",
        "synthetic_feddc",
        "part",
    ):
        data = entry.make()
        assert data.name == ("digits" if name == "part" else name)  # the default inner data set
        assert int(data.train.labels.max()) < (data.classes or 10)
        return
    with pytest.raises(
        FedloomError, match=r"\A[^\n]*(put .* in FOLDER|needs path|no such folder|must be)[^\n]*\Z"
    ):
        entry.make()
