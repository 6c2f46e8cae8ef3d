"""Images retain their levels and orientation, and the reader uses or reports each file."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedloom as fl
from fedloom.common.errors import DataError
from fedloom.data.formats.pictures import read_files

GREY = np.linspace(0, 255, 64).round().astype(np.uint8).reshape(8, 8)


def decoded(path: Path, channels: int = 1) -> np.ndarray:
    pixels: np.ndarray = read_files([path], channels)[0].numpy()
    return pixels


@pytest.mark.parametrize(
    ("pixels", "name"),
    [
        (GREY, "a.png"),
        (GREY.astype(np.uint16) * 257, "a.png"),
        (GREY.astype(np.uint16) * 257, "a.tif"),
        (GREY.astype(np.float32) / 255, "a.tif"),
    ],
)
def test_pictures_keep_their_levels(pixels: np.ndarray, name: str, tmp_path: Path) -> None:
    Image.fromarray(pixels).save(tmp_path / name)
    assert np.array_equal(decoded(tmp_path / name)[0], GREY)
    assert np.array_equal(decoded(tmp_path / name, 3)[2], GREY)


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "I;16", "I", "F"])
def test_every_mode_keeps_its_levels_or_is_refused(mode: str, tmp_path: Path) -> None:
    picture = Image.fromarray(GREY).convert(mode)
    path = tmp_path / ("a.tif" if mode in ("CMYK", "I", "F") else "a.png")
    picture.save(path)
    if mode in ("I", "F"):  # 0 to 255: the white level is unknown
        with pytest.raises(DataError, match="levels from 0 to 255 of 32 bits have no rule"):
            decoded(path)
        return
    levels = len(np.unique(decoded(path)))
    assert levels == (2 if mode in ("1", "I;16") else 64)  # in 16 bits, levels 0 to 255 are black


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_upright(orientation: int, tmp_path: Path) -> None:
    corner = np.zeros((16, 24, 3), np.uint8)
    corner[:8, :8] = 255
    picture = Image.fromarray(corner)
    stored = {
        1: (), 2: (Image.Transpose.FLIP_LEFT_RIGHT,), 3: (Image.Transpose.ROTATE_180,),
        4: (Image.Transpose.FLIP_TOP_BOTTOM,), 5: (Image.Transpose.TRANSPOSE,),
        6: (Image.Transpose.ROTATE_90,), 7: (Image.Transpose.TRANSVERSE,),
        8: (Image.Transpose.ROTATE_270,),
    }[orientation]  # fmt: skip
    for step in stored:
        picture = picture.transpose(step)
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.save(tmp_path / "a.jpg", exif=exif, quality=100)
    pixels = decoded(tmp_path / "a.jpg", 3)
    assert pixels.shape == (3, 16, 24)
    assert pixels[:, :8, :8].mean() > 200
    assert pixels[:, 8:, 8:].mean() < 20


def class_folder(root: Path) -> None:
    for at, path in enumerate(("ant/0.png", "ant/1.PNG", "bee/day1/0.png", "bee/day2/1.jfif")):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        form = "JPEG" if path.endswith("jfif") else "PNG"
        Image.fromarray(np.full((8, 8, 3), 60 * at, np.uint8)).save(root / path, format=form)


def test_deeper_pictures_are_read_and_other_files_are_named(tmp_path: Path) -> None:
    class_folder(tmp_path / "a")
    (tmp_path / "a" / "__MACOSX" / "ant").mkdir(parents=True)
    (tmp_path / "a" / "__MACOSX" / "ant" / "._0.png").write_bytes(b"fork")
    (tmp_path / "a" / "bee" / ".DS_Store").write_bytes(b"")
    dataset = fl.make_task(f"images(folder='{tmp_path / 'a'}')", clients=1, partition="iid").dataset
    assert dataset.class_names == ("ant", "bee")
    both = torch.cat([dataset.train.labels, dataset.test.labels])
    assert both.bincount().tolist() == [2, 2]
    assert dataset.notices == ()
    (tmp_path / "a" / "bee" / "3.heic").write_bytes(b"")
    Image.fromarray(GREY).save(tmp_path / "a" / "stray.png")
    dataset = fl.make_task(f"images(folder='{tmp_path / 'a'}')", clients=1, partition="iid").dataset
    assert "2 files are not read" in dataset.notices[0]
    assert "bee/3.heic, stray.png" in dataset.notices[0]
    (tmp_path / "a" / "cow").mkdir()
    with pytest.raises(DataError, match="cow: no pictures of this class"):
        fl.make_task(f"images(folder='{tmp_path / 'a'}')", clients=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(inputs)
        return result


class PictureNet(nn.Module):
    """A network with batch norm over images. Batches of one image are possible."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 3)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(inputs)
        return result


def test_pictures_train_one_by_one_with_batch_norm(caplog: pytest.LogCaptureFixture) -> None:
    """All samples take part, because PyTorch accepts these batches of one image.

    Three clients of 7 samples make 7 steps in batches of one and 4 steps in batches of two.
    """
    numbers = np.random.default_rng(0)
    samples = fl.Samples(numbers.normal(size=(21, 1, 6, 6)), np.arange(21) % 3)
    dataset = fl.Dataset("pictures", samples, samples)
    for batch_size, steps in ((1, 7), (2, 4)):
        task = fl.make_task(
            dataset,
            clients=3,
            partition="iid",
            model=PictureNet(),
            training={"batch_size": batch_size},
        )
        with caplog.at_level(logging.WARNING, "fedloom"):
            result = fl.run("fedavg", task, rounds=1, participation=1.0, engine="rows")
        counts = [
            int(value) for name, value in result.model.state_dict().items() if "batches" in name
        ]
        assert counts == [steps]
    assert not [text for text in caplog.messages if "batch norm" in text]


def test_samples_that_batch_norm_leaves_out_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    samples = fl.Samples(np.random.default_rng(0).normal(size=(27, 4)), np.arange(27) % 3)
    dataset = fl.Dataset("d", samples, samples)
    task = fl.make_task(
        dataset, clients=3, partition="iid", model=Net(), training={"batch_size": 4}
    )
    with caplog.at_level(logging.WARNING, "fedloom"):
        fl.run("fedavg", task, rounds=1, participation=1.0, engine="rows")
    notices = [text for text in caplog.messages if "skip the last sample" in text]
    assert [text[: len("3 of 3 clients skip")] for text in notices] == ["3 of 3 clients skip"]


@pytest.mark.parametrize(("batch_size", "idle"), [(1, 3), (4, 0)])
def test_clients_without_a_step_are_told(
    batch_size: int, idle: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = fl.Samples(np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3)
    training = {"batch_size": batch_size, "learning_rate": 0.1}
    dataset = fl.Dataset("d", samples, samples)
    task = fl.make_task(dataset, clients=3, partition="iid", model=Net(), training=training)
    with caplog.at_level(logging.WARNING, "fedloom"):
        fl.run("fedavg", task, rounds=1, participation=1.0, engine="rows")
    told = [text for text in caplog.messages if "take 0 training steps" in text]
    assert [text[: len("3 of 3 clients")] for text in told] == ["3 of 3 clients"] * (idle > 0)
