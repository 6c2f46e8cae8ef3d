"""The user's data: arrays, folders of pictures and Python functions."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from PIL import Image

import fedloom as fl
from data_support import make, random_pixels
from fedloom.common.errors import DataError, FedloomError, InvalidValue
from fedloom.data.sets.normalisation import channel_scale


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))


# --- arrays ---


def test_arrays_of_an_npz_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    inputs, labels = random_pixels(20, 3, 4, 5), np.arange(20) % 4
    names = np.array(["b", "a"] * 10)
    np.savez(
        path,
        inputs=inputs,
        labels=labels,
        groups=names,
        test_inputs=inputs[:3],
        test_labels=labels[:3],
    )
    data = make("arrays", path=str(path))
    assert (data.spec.shape, data.classes, len(data.train), len(data.test)) == ((3, 4, 5), 4, 20, 3)
    assert np.array_equal(data.train.inputs.numpy(), inputs)
    assert data.train.groups is not None
    assert data.train.groups.tolist() == [1, 0] * 10
    expected = inputs.transpose(1, 0, 2, 3).reshape(3, -1) / 255
    assert data.mean == pytest.approx(expected.mean(1).tolist())
    assert data.std == pytest.approx(expected.std(1).tolist())


def test_arrays_of_a_folder_are_held_out_by_class(tmp_path: Path) -> None:
    np.save(tmp_path / "inputs.npy", np.arange(40.0).reshape(20, 2))
    np.save(tmp_path / "labels.npy", np.repeat([0, 1], 10))
    data = make("arrays", path=str(tmp_path), test_fraction=0.3, classes=5)
    assert (data.classes, data.train.inputs.dtype, data.mean) == (5, torch.float32, None)
    assert data.train.labels.bincount().tolist() == [7, 7]
    assert data.test.labels.bincount().tolist() == [3, 3]
    column = torch.cat([data.train.inputs, data.test.inputs])[:, 0]
    assert sorted(column.tolist()) == list(range(0, 40, 2))
    other_seed = make("arrays", path=str(tmp_path), test_fraction=0.3, seed=1)
    assert not torch.equal(other_seed.test.inputs, data.test.inputs)


@pytest.mark.parametrize(
    ("inputs", "layout", "shape"),
    [
        (random_pixels(6, 7, 8), "channels_first", (1, 7, 8)),
        (random_pixels(6, 7, 8, 3), "channels_last", (3, 7, 8)),
        (random_pixels(6, 3, 7, 8), "channels_first", (3, 7, 8)),
    ],
)
def test_pictures_get_a_channel_axis(
    inputs: np.ndarray, layout: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    np.savez(
        tmp_path / "a.npz",
        inputs=inputs,
        labels=[0, 1, 2] * 2,
        test_inputs=inputs,
        test_labels=[0, 1, 2] * 2,
    )
    data = make("arrays", path=str(tmp_path / "a.npz"), layout=layout)
    assert data.spec.shape == shape
    assert np.array_equal(
        data.train.inputs[4].numpy().squeeze(),
        inputs[4].transpose(2, 0, 1) if inputs.shape[-1] == 3 else inputs[4],
    )


def test_integers_are_tokens(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz", inputs=np.array([[1, 2], [0, 7], [3, 3], [4, 0]]), labels=[0, 1, 0, 1]
    )
    data = make("arrays", path=str(tmp_path / "a.npz"), test_fraction=0.5)
    assert (data.vocabulary, data.train.inputs.dtype) == (8, torch.int64)


_GOOD: dict[str, Any] = {"inputs": np.zeros((4, 2)), "labels": np.array([0, 1, 0, 1])}


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        ({"labels": None}, {}, "no array 'labels' (it has: inputs)"),
        ({"lables": np.zeros(4, int)}, {}, "unknown array 'lables': did you mean 'labels'?"),
        ({"test_inputs": np.zeros((1, 2))}, {}, "no array 'test_labels'"),
        (
            {"test_inputs": np.zeros((1, 3)), "test_labels": np.zeros(1, int)},
            {},
            "inputs for training are [2]",
        ),
        ({"labels": np.array([0, 1, 2])}, {}, "4 inputs but 3 labels"),
        ({"labels": np.array([0, -1, 0, 1])}, {}, "label -1 in row 1"),
        ({"labels": np.array([0.5] * 4)}, {}, "must be a list of integers"),
        (
            {"labels": np.array([0, 1, 5, 1])},
            {"classes": 3},
            "labels must be 0 to 2, and 5 is among them",
        ),
        (
            {"inputs": np.array([[0, 1], [0, np.nan], [0, 1], [0, 1]])},
            {},
            "NaN or infinity in row 1",
        ),
        ({"inputs": np.full((4, 2), -3)}, {}, "tokens"),
        ({"inputs": np.zeros((4, 2), complex)}, {}, "inputs are complex128: give whole numbers"),
        ({"inputs": random_pixels(4, 2)}, {}, "pictures of 3 or 4 dimensions"),
        ({"groups": np.zeros(3, int)}, {}, "3 client ids but 4 labels"),
        (
            {"labels": np.array([[0], [1], [0], [{}]], dtype=object)},
            {},
            "damaged, or neither an npz",
        ),
        ({}, {"layout": "channels_lst"}, "did you mean 'channels_last'?"),
    ],
)
def test_bad_arrays_are_refused_in_one_line(
    change: dict[str, Any], options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    arrays = {key: value for key, value in {**_GOOD, **change}.items() if value is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(FedloomError) as caught:
        make("arrays", path=str(tmp_path / "a.npz"), **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_arrays(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="arrays needs path"):
        make("arrays")
    with pytest.raises(DataError, match=r"absent.npz: cannot be read"):
        make("arrays", path=str(tmp_path / "absent.npz"))
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04torn")
    with pytest.raises(DataError, match=r"torn.npz: damaged"):
        make("arrays", path=str(tmp_path / "torn.npz"))
    np.savez(tmp_path / "new.npz", inputs=np.zeros((2, 1)), labels=[0, 1])
    content = bytearray((tmp_path / "new.npz").read_bytes())
    content[content.index(b"PK\x01\x02") + 6] = (
        255  # "version needed to extract" of the first member
    )
    (tmp_path / "new.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"new.npz: damaged, .*zip file version"):
        make("arrays", path=str(tmp_path / "new.npz"))
    with ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("inputs.npy", "no array")
    with pytest.raises(DataError, match=r"text.npz: damaged, or neither an npz"):
        make("arrays", path=str(tmp_path / "text.npz"))
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"one.npy: damaged, or neither an npz file"):
        make("arrays", path=str(tmp_path / "one.npy"))


def test_channel_scale_of_a_constant_channel_is_one() -> None:
    images = torch.from_numpy(random_pixels(9, 2, 4, 4))
    images[:, 1] = 51
    mean, std = channel_scale(images)
    assert mean[1] == pytest.approx(0.2)
    assert std[0] == pytest.approx(float((images[:, 0].double() / 255).std(correction=0)))
    assert std[1] == 1.0


def test_client_ids_mean_the_same_in_both_parts(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "inputs": np.zeros((4, 2)),
        "labels": np.array([0, 1, 0, 1]),
        "groups": np.array(["x", "z", "y", "x"]),
    }
    test_arrays: dict[str, Any] = {
        "test_inputs": np.zeros((2, 2)),
        "test_labels": np.array([1, 0]),
        "test_groups": np.array(["z", "yy"]),
    }
    np.savez(tmp_path / "a.npz", **arrays, **test_arrays)
    data = make("arrays", path=str(tmp_path / "a.npz"))
    assert data.train.groups is not None
    assert data.test.groups is not None
    assert data.train.groups.tolist() == [0, 3, 1, 0]
    assert data.test.groups.tolist() == [3, 2]


# --- images ---


def _write_images(root: Path, classes: dict[str, int], size: tuple[int, int] = (6, 5)) -> None:
    for at, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(random_pixels(*size, 3, seed=50 * at + number)).save(
                root / name / f"{number}.png"
            )


def test_images_with_a_test_part_are_read(tmp_path: Path) -> None:
    _write_images(tmp_path / "set" / "train", {"dog": 3, "cat": 2})
    _write_images(tmp_path / "set" / "test", {"dog": 1})
    data = make("images", folder=str(tmp_path / "set"))
    assert (data.class_names, data.spec.shape) == (("cat", "dog"), (3, 6, 5))
    assert data.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert data.test.labels.tolist() == [1]
    assert np.array_equal(
        data.train.inputs[2].numpy(), random_pixels(6, 5, 3, seed=0).transpose(2, 0, 1)
    )
    assert make("images", folder=str(tmp_path / "set"), channels=1, size=9).spec.shape == (1, 9, 9)


def test_images_without_a_test_part_are_held_out(tmp_path: Path) -> None:
    _write_images(tmp_path / "set", {"a": 10, "b": 5})
    data = make("images", folder=str(tmp_path / "set"))
    assert (data.train.labels.bincount().tolist(), data.test.labels.bincount().tolist()) == (
        [8, 4],
        [2, 1],
    )
    repeated = make("images", folder=str(tmp_path / "set"))
    assert torch.equal(repeated.test.inputs, data.test.inputs)


def test_bad_image_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="images: no such folder"):
        make("images")
    with pytest.raises(InvalidValue, match="channels must be 1 or 3, not 4"):
        make("images", channels=4)
    _write_images(tmp_path / "set", {"a": 2})
    with pytest.raises(DataError, match="1 class folders"):
        make("images", folder=str(tmp_path / "set"))
    _write_images(tmp_path / "set", {"b": 2})
    (tmp_path / "set" / "b" / "1.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"1.png: not a picture"):
        make("images", folder=str(tmp_path / "set"))


# --- python ---


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module that loads data in every allowed and some other ways, and return its name."""
    name = "loads_data_for_the_test"
    (tmp_path / f"{name}.py").write_text(
        "import fedloom as fl, numpy as np, torch\n"
        "x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2\n"
        "def pair(): return x, y\n"
        "def clients(): return torch.from_numpy(x), torch.from_numpy(y), y + 5\n"
        "def parts(): return (x, y), (x[:2], y[:2])\n"
        "def parts_with_clients(): return (x, y, y + 3), (x[:2], y[1:3], y[1:3] + 3)\n"
        "def samples(): return fl.Samples(x, y), fl.Samples(x[:2], y[:2])\n"
        "def four(): return x, y, y, y\n"
        "def nothing(): return None\n"
        "def fails(): raise KeyError('lost')\n"
        "number = 3\n"
        f"def late():\n    from {name}_too import value\n    return x + value, y\n"
    )
    (tmp_path / f"{name}_too.py").write_text("value = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    for module_name in (name, f"{name}_too"):
        monkeypatch.delitem(sys.modules, module_name, raising=False)
    return name


def test_a_python_function_gives_samples_clients_and_a_test_part(module: str) -> None:
    pair = make("python", source=f"{module}:pair")
    assert (len(pair.train), len(pair.test), pair.classes, pair.spec.shape) == (8, 2, 2, (2,))
    clients = make("python", source=f"{module}:clients", test_fraction=0.4)
    assert clients.train.groups is not None
    assert torch.equal(clients.train.groups, clients.train.labels + 5)
    split = make("python", source=f"{module}:parts")
    assert (len(split.train), split.test.inputs.tolist()) == (10, [[0, 1], [2, 3]])
    with_clients = make("python", source=f"{module}:parts_with_clients")
    assert with_clients.test.groups is not None
    assert with_clients.test.groups.tolist() == [4, 3]
    samples = make("python", source=f"{module}:samples")
    assert (len(samples.train), samples.test.inputs.tolist()) == (10, [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("function", "text"),
    [
        ("four", "returned 4 values; wanted"),
        ("nothing", "returned a NoneType"),
        ("fails", "raised KeyError: 'lost'"),
        ("number", "'number' must be a function or class, not int"),
        ("pairs", "did you mean 'pair'?"),
    ],
)
def test_bad_python_functions_are_refused_in_one_line(
    function: str, text: str, module: str
) -> None:
    with pytest.raises((DataError, InvalidValue)) as caught:
        make("python", source=f"{module}:{function}")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_function_may_import_from_the_current_folder_when_called(module: str) -> None:
    """The current folder stays importable when the function runs, as for models.

    A worker process that unpickles the result may need it too.
    """
    assert len(make("python", source=f"{module}:late").train) == 8
    assert sys.path.count(os.getcwd()) == 1


def test_a_source_needs_a_module_and_a_function() -> None:
    for source in ("", "module", ":load", "module:"):
        with pytest.raises(InvalidValue, match=rf"^source '{source}' must be 'module:function'$"):
            make("python", source=source)
    with pytest.raises(
        InvalidValue,
        match=r"^source 'no_such_module_here:load': cannot import 'no_such_module_here': Module",
    ):
        make("python", source="no_such_module_here:load")
    with pytest.raises(
        InvalidValue, match=r"is a file: give the name of the module, such as 'my\.data'$"
    ):
        make("python", source="my/data.py:load")


@pytest.mark.parametrize("split", [False, True])
def test_folders_of_clients_with_folders_of_classes(tmp_path: Path, split: bool) -> None:
    root = tmp_path / "set"
    parts = [root / "train", root / "test"] if split else [root]
    for part in parts:
        _write_images(part / "north", {"cat": 6, "dog": 4})
        _write_images(part / "south", {"dog": 5})
    data = make("images", folder=str(root), by_client=True)
    assert data.class_names == ("cat", "dog")
    pairs = []
    for samples in (data.train, data.test):
        assert samples.groups is not None
        assert samples.group_names == ("north", "south")
        pairs += list(zip(samples.groups.tolist(), samples.labels.tolist(), strict=True))
    counts = {pair: pairs.count(pair) for pair in pairs}
    assert counts == {(0, 0): 6 * len(parts), (0, 1): 4 * len(parts), (1, 1): 5 * len(parts)}
    again = make("images", folder=str(root), by_client=True)  # from the cache
    assert again.train.groups is not None
    assert torch.equal(again.train.groups, data.train.groups)  # type: ignore[arg-type]
    task = fl.make_task(data, clients=0, partition="natural", model="logistic")
    assert task.clients == 2
    assert task.partition.sizes.sum() == len(data.train)


def test_folders_of_clients_without_classes_are_refused(tmp_path: Path) -> None:
    _write_images(tmp_path / "one" / "north", {"cat": 2})
    with pytest.raises(DataError, match="pictures of 1 classes in <client>/<class>/<picture>"):
        make("images", folder=str(tmp_path / "one"), by_client=True)
    _write_images(tmp_path / "two" / "train" / "north", {"cat": 2, "dog": 2})
    _write_images(tmp_path / "two" / "test" / "north", {"cow": 1})
    with pytest.raises(DataError, match="cow: no such class among the training images"):
        make("images", folder=str(tmp_path / "two"), by_client=True)


def test_a_function_returns_labels_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "told.py").write_text(
        "import numpy as np\n"
        "def load():\n"
        "    inputs = np.arange(40.0).reshape(20, 2)\n"
        "    return inputs, ['well', 'ill'] * 10, np.arange(20) % 4\n"
        "def both():\n"
        "    return load(), (np.zeros((1, 2)), np.array(['worse']))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = make("python", source="told:load", test_fraction=0.2)
    assert (data.classes, data.class_names) == (2, ("ill", "well"))
    for samples in (data.train, data.test):
        odd = samples.inputs[:, 0] % 4 == 2  # rows with an odd number, which are ill
        assert torch.equal(samples.labels, torch.where(odd, 0, 1))
    assert make("python", source="told:both").class_names == ("ill", "well", "worse")
