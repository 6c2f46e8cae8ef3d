"""Bundles: the runs of a folder in one zip file, which somebody else can run again
(`fedloom.evidence.replay`).

bundle.json         title, runs, and the SHA-256 of every other file
runs/0/...          files of the first run, as in its directory; where its data lie is left out, and no file holds data
code/my_module.py   modules of the user's own that the runs need

Reading a bundle runs nothing. Whatever it holds is bounded first, checked against its digests, and
written below one folder.
"""

import importlib.util
import io
import json
import re
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

import fedloom
from fedloom.config.expression import Call, parse
from fedloom.config.plugins import import_plugins
from fedloom.data.formats.limits import reading
from fedloom.errors import DataError, InvalidValue, is_user_code, quoted
from fedloom.experiment.directory import RunDirectory, to_json
from fedloom.experiment.finished import read_runs
from fedloom.state.digest import digest
from fedloom.state.files import make_folder, write_bytes

LARGEST, UNPACKED, MOST_FILES = 64 << 20, 512 << 20, 10_000
"""Bytes of a bundle, bytes of all that it holds, and the number of its files, at most."""

_MODEL = 8 << 20  # bytes of a model that goes into a bundle; of a larger one only its checksum does
_COPIED = (
    "*.json",
    "metrics.jsonl",
    "clients.jsonl",
    "recorded.jsonl",
    "model.safetensors",
    "recorded/round-*",
)
_FILE = r"runs/\d{1,4}/(recorded/round-\d{7}|[a-z]+)\.(jsonl?|safetensors)|code/([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py"
_OWN = re.compile(r"\b([A-Za-z_][\w.]*):[A-Za-z_]")
_LOCATIONS = ("folder", "path", "test_path", "file")


@dataclass(frozen=True)
class BundledRun:
    """A run: the label of its setting, its method and its seed."""

    setting: str
    algorithm: str
    seed: int


@dataclass(frozen=True)
class Bundle:
    """The contents of a bundle: its runs, and the digests of its files by name."""

    title: str
    runs: list[BundledRun]
    files: dict[str, str] = field(default_factory=dict)
    fedloom: str = fedloom.__version__
    format: Literal[1] = 1

    @property
    def code(self) -> list[str]:
        """The files of the user's own modules."""
        return [name for name in self.files if name.startswith("code/")]


def write_bundle(folder: Path, path: Path) -> Bundle:
    """Write the runs of a folder, a run's, a comparison's or a reproduced table's, into one file.

    Raises `InvalidValue` for a run that is not finished or not of a configuration,
    `CheckpointError` for a damaged file.
    """
    runs, files, modules = list[BundledRun](), dict[str, bytes](), set[str]()
    for number, run in enumerate(read_runs(folder)):
        directory, stored = run.path, run.summary.configuration
        if not RunDirectory(directory).finished:
            raise InvalidValue(f"{directory} is not finished: go on with it first")
        if "partition" not in stored["data"]:
            raise InvalidValue(
                f"{directory} was made in Python from a task: only a configuration can be run again"
            )
        modules |= {
            *stored.get("plugins", ()),
            *_OWN.findall(json.dumps({**stored, "plugins": []})),
        }
        for source in sorted(source for pattern in _COPIED for source in directory.glob(pattern)):
            if source.name != "model.safetensors" or source.stat().st_size <= _MODEL:
                files[f"runs/{number}/{source.relative_to(directory).as_posix()}"] = (
                    source.read_bytes()
                )
        portable = relocated(stored, lambda call, parameter, location: Path(location).name)
        files[f"runs/{number}/configuration.json"] = to_json(portable).encode()
        runs.append(BundledRun(run.setting, run.summary.algorithm, run.summary.seed))
    import_plugins(sorted(modules))
    files = {
        name: content for name, content in files.items() if re.fullmatch(_FILE, name)
    } | _sources(modules)
    bundle = Bundle(
        folder.resolve().name, runs, {name: digest(content) for name, content in files.items()}
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in {"bundle.json": to_json(asdict(bundle)).encode(), **files}.items():
            archive.writestr(
                zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED
            )
    write_bytes(path, packed.getvalue())
    return bundle


def _sources(names: Iterable[str]) -> dict[str, bytes]:
    """Return the files of the user's modules, and of those that they import, by name."""
    files: dict[str, bytes] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if (
            spec is not None
            and spec.origin
            and spec.origin.endswith(".py")
            and is_user_code(spec.origin)
        ):
            package = "/__init__.py" if spec.submodule_search_locations else ".py"
            path, text = (
                f"code/{name.replace('.', '/')}{package}",
                Path(spec.origin).read_text(encoding="utf-8"),
            )
            if path not in files:
                files[path] = text.encode()
                imported = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", text, re.M)
                waiting += [
                    f"{spec.parent}{module}" if module.startswith(".") else module
                    for module in imported
                ]
                waiting += [spec.parent] if spec.parent else []
    return files


def relocated(value: Any, locate: Callable[[str, str, str], str | None]) -> Any:
    """Return a configuration, or something in it, with other locations of files.

    `locate` takes the name of a data set (or the like), a parameter and a location to another, or
    to None to leave it out.
    """
    if isinstance(value, Mapping):
        return {
            k: locate("clock", k, v) if k == "trace" and v else relocated(v, locate)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [relocated(item, locate) for item in value]
    if isinstance(value, str) and re.search(rf"\b({'|'.join(_LOCATIONS)})\s*=", value):
        return str(relocated(parse(value), locate))
    if not isinstance(value, Call):
        return value
    named = {key: relocated(item, locate) for key, item in value.named.items()}
    located = {
        k: locate(value.name, k, v)
        for k, v in named.items()
        if k in _LOCATIONS and isinstance(v, str)
    }
    kept = {
        key: item
        for key, item in {**named, **located}.items()
        if item is not None or key not in located
    }
    return Call(
        value.name, tuple(relocated(item, locate) for item in value.positional), kept, value.until
    )


def unpack(path: Path, folder: Path) -> Bundle:
    """Write the files of a bundle into a folder. Raise `DataError`, in one line, where it holds
    what no bundle does.
    """
    with reading(path, "no bundle, or a damaged one"), path.open("rb") as file:
        files = _unpacked(file.read(LARGEST + 1))
        bundle = TypeAdapter(Bundle).validate_json(files.pop("bundle.json"))
    if not all(f"{run.setting}{run.algorithm}{bundle.title}".isprintable() for run in bundle.runs):
        raise DataError(f"{path} is no bundle: it has names with control characters")
    digests = {name: digest(content) for name, content in files.items()}
    for name in sorted({*digests, *bundle.files}):
        if digests.get(name) != bundle.files.get(name):
            raise DataError(f"{path} is damaged: {quoted(name)} is not as it was written")
    for name, content in files.items():
        make_folder((folder / name).parent)
        write_bytes(folder / name, content, durable=False)
    return bundle


def _unpacked(content: bytes) -> dict[str, bytes]:
    """Return the files of an archive. Raise `ValueError` for what `write_bundle` never writes,
    before it is unpacked.
    """
    end = content[-22:]
    if (
        len(content) > LARGEST
        or end[:4] + end[20:] != b"PK\5\6\0\0"
        or content[-42:-38] == b"PK\6\7"
    ):
        raise ValueError(f"not a plain zip file of at most {LARGEST >> 20} MiB")
    count, length = struct.unpack("<HI", end[10:16])
    if count > MOST_FILES or length > 200 * MOST_FILES:
        raise ValueError(f"more than {MOST_FILES:,} files")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if len({entry.filename for entry in entries}) < len(entries):
            raise ValueError("two files have one name")
        if sum(entry.file_size for entry in entries) > UNPACKED:
            raise ValueError(f"it unpacks to more than {UNPACKED >> 20} MiB")
        for entry in entries:
            if not re.fullmatch(rf"bundle\.json|{_FILE}", entry.orig_filename):
                raise ValueError(f"no bundle holds {quoted(entry.orig_filename)}")
            link = stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG)
            if (
                link
                or entry.flag_bits & 1
                or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            ):
                raise ValueError(
                    f"{quoted(entry.filename)} is a link, encrypted, or packed in another way"
                )
        # as much as declared
        return {entry.filename: archive.open(entry).read(entry.file_size) for entry in entries}
