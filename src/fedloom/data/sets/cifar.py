"""CIFAR-10 and CIFAR-100, the latter with its 100 fine or its 20 coarse labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.data.formats.cifar import read_binary_batches, read_python_batches
from fedloom.data.formats.hub import hub_table
from fedloom.data.formats.parquet import image_samples, read_tables
from fedloom.data.sets.normalisation import Scale, check_normalise, image_dataset
from fedloom.data.sets.origin import Origin, Parts, cached_files, cached_parts, files_named, load, parquet_files

_CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@dataclass(frozen=True)
class _Form:
    """How one of the sets is stored in its three forms: batches of either kind, and columns of a table."""

    name: str
    folders: tuple[str, ...]
    repository: str
    classes: int
    python_files: tuple[str, ...]
    python_label: str
    binary_files: tuple[str, ...]
    label_bytes: int
    label_at: int
    column: str
    scale: Scale
    class_names: tuple[str, ...] | None = None


@datasets.register("cifar10")
def cifar10(*, folder: str | None = None, hub: bool | None = None, normalise: str = "standard") -> Dataset:
    """CIFAR-10: 50,000 and 10,000 colour images `[3, 32, 32]`, 10 classes.

    Read from the Python or the binary batches or parquet. "standard": mean (.491, .482, .447), deviation (.247, .243,
    .262), as FedDC and FedUmf have it; FedMR and FedALA use "half". Source: Krizhevsky, 2009.
    """
    form = _Form(
        "cifar10",
        ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10", "cifar-10", "CIFAR10", "cifar10-jpeg"),
        "uoft-cs/cifar10",
        10,
        (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
        "labels",
        (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
        1,
        0,
        "label",
        ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
        _CIFAR10_NAMES,
    )
    return _dataset(form, folder, hub, normalise)


@datasets.register("cifar100")
def cifar100(*, folder: str | None = None, hub: bool | None = None, normalise: str = "standard") -> Dataset:
    """CIFAR-100 with fine labels: 50,000 and 10,000 colour images `[3, 32, 32]`, 100 classes.

    "standard": mean (.5071, .4867, .4408), deviation (.2675, .2565, .2761), as FedDC and FedUmf have it; FedALA uses
    "half". Source: Krizhevsky, 2009.
    """
    scale: Scale = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
    return _dataset(_cifar100("cifar100", "fine", 100, 1, scale), folder, hub, normalise)


@datasets.register("cifar100_coarse")
def cifar100_coarse(*, folder: str | None = None, hub: bool | None = None, normalise: str = "standard") -> Dataset:
    """CIFAR-100 with coarse labels: the same images, 20 classes; what FedMR's code trains on.

    "standard": mean (.4914, .4822, .4465), deviation (.2023, .1994, .2010), as FedMR has it. Source: Krizhevsky, 2009.
    """
    scale: Scale = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    return _dataset(_cifar100("cifar100_coarse", "coarse", 20, 0, scale), folder, hub, normalise)


def _cifar100(name: str, kind: str, classes: int, label_at: int, scale: Scale) -> _Form:
    return _Form(
        name,
        ("cifar-100-python", "cifar-100-binary", "cifar100", "cifar-100", "CIFAR100"),
        "uoft-cs/cifar100",
        classes,
        ("train", "test"),
        f"{kind}_labels",
        ("train.bin", "test.bin"),
        2,
        label_at,
        f"{kind}_label",
        scale,
    )


def _dataset(form: _Form, folder: str | None, hub: bool | None, normalise: str) -> Dataset:
    check_normalise(normalise)

    def fetch() -> Parts:
        train, test = (
            _table_samples(form, hub_table(form.repository, split), f"{form.repository} {split}")
            for split in ("train", "test")
        )
        return train, test

    def kept() -> Parts:
        return cached_parts(f"hub-{form.name}", form.repository, fetch)

    wanted = f"{', '.join(form.python_files)} or {', '.join(form.binary_files)} or train*.parquet, test*.parquet"
    origin = Origin(form.name, form.folders, wanted, lambda place: _read(form, place), kept)
    return image_dataset(form.name, load(origin, folder, hub), form.classes, normalise, form.scale, form.class_names)


def _read(form: _Form, place: Path) -> Parts | None:
    files = files_named(place, form.python_files)
    if files is not None:
        train, test = (read_python_batches(part, form.python_label, form.classes) for part in (files[:-1], files[-1:]))
        return train, test
    files = files_named(place, form.binary_files)
    if files is not None:
        train, test = (
            read_binary_batches(part, form.label_bytes, form.label_at, form.classes)
            for part in (files[:-1], files[-1:])
        )
        return train, test
    found = parquet_files(place)
    if found is None:
        return None
    # Decoding 60,000 pictures takes seconds: they are decoded once.
    return cached_files(form.name, form.column, [*found[0], *found[1]], lambda: _read_parquet(form, *found))


def _read_parquet(form: _Form, train: list[Path], test: list[Path]) -> Parts:
    return _table_samples(form, read_tables(train), str(train[0])), _table_samples(
        form, read_tables(test), str(test[0])
    )


def _table_samples(form: _Form, table: object, source: str) -> Samples:
    return image_samples(table, form.column, form.classes, 3, source)
