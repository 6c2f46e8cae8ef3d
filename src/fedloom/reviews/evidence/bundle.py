"""Bundles: the runs of a folder in one zip file, for a replay elsewhere
(`fedloom.reviews.evidence.replay`).

bundle.json         title, runs, and the SHA-256 of every other file
runs/0/...          files of the first run, as in its directory; without the locations of data, and
                    without data
code/my_module.py   modules of the user that the runs need

Reading a bundle runs no code. The contents are bounded first, checked against their digests, and
written below one folder.
"""

import importlib.util
import io
import re
import shutil
import stat
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

import fedloom
from fedloom.common.digest import digest
from fedloom.common.errors import DataError, InvalidValue, is_user_code, quoted
from fedloom.common.expression import Call, parse
from fedloom.common.plugins import import_plugins
from fedloom.data.dataset import datasets
from fedloom.data.formats.limits import reading
from fedloom.data.partition import partitions
from fedloom.models import models
from fedloom.runs.directory import RunDirectory, to_json
from fedloom.state.files import make_folder, remove, write_bytes
from fedloom.study.stored_runs import read_runs

LARGEST = 64 << 20
UNPACKED = 512 << 20
MOST_FILES = 10_000
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
_FILE = (
    r"runs/\d{1,4}/(recorded/round-\d{7}|[a-z]+)\.(jsonl?|safetensors)"
    r"|code/([A-Za-z_]\w*/)*[A-Za-z_]\w*\.py"
)
_OWN = re.compile(r"\b([A-Za-z_][\w.]*):[A-Za-z_]")
_LONGEST_NAME = 10_000
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
    """Write the runs of a folder into one file: one run, a comparison or a reproduced table.

    Args:
        folder: Folder of the runs.
        path: The file to write; an existing file is replaced.

    Returns:
        The contents of the bundle, with a digest of each file.

    Raises:
        InvalidValue: A run is not finished, or was not made from a configuration.
        CheckpointError: A file is damaged.
    """
    runs = list[BundledRun]()
    files = dict[str, bytes]()
    modules = set[str]()
    for number, run in enumerate(read_runs(folder)):
        directory = run.path
        stored = run.summary.configuration
        if not RunDirectory(directory).finished:
            raise InvalidValue(f"{directory} is not finished: go on with it first")
        if "partition" not in stored["data"]:
            raise InvalidValue(
                f"{directory} was made in Python from a task: only a configuration can be run again"
            )
        modules |= {*stored.get("plugins", ())} | _own_modules({**stored, "plugins": []})
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
            path = f"code/{name.replace('.', '/')}{package}"
            text = Path(spec.origin).read_text(encoding="utf-8")
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

    Expressions are read as `Registry.read` reads them, also those in a text inside another one and
    arguments without a name.

    Args:
        value: Configuration, or a value in it.
        locate: Takes the name of a data set (or the like), a parameter and a location to another
            location, or to None to leave it out.

    Returns:
        The value, of which everything else is as it was.
    """

    def change(call: Call) -> dict[str, Any]:
        located = {
            name: locate(call.name, name, location)
            for name, location in call.named.items()
            if name in _LOCATIONS and isinstance(location, str)
        }
        return {
            k: v for k, v in (call.named | located).items() if v is not None or k not in located
        }

    if isinstance(value, Mapping):
        return {
            k: locate("clock", k, v) if k == "trace" and v else relocated(v, locate)
            for k, v in value.items()
        }
    return rewritten(value, change)


def rewritten(value: Any, change: Callable[[Call], dict[str, Any]]) -> Any:
    """Return a value with other arguments of its calls of data sets, partitions and models.

    Args:
        value: Text, call, list, or another value.
        change: Returns the arguments of such a call, of which all have their names.

    Returns:
        The value; a text as it was written if nothing in it changes.
    """
    if isinstance(value, list | tuple):
        return type(value)(rewritten(item, change) for item in value)
    if isinstance(value, str):
        try:
            call = parse(value)
        except InvalidValue:
            return value
        changed = rewritten(call, change)
        return value if changed == call else str(changed)
    if not isinstance(value, Call):
        return value
    positional = tuple(rewritten(item, change) for item in value.positional)
    named = {key: rewritten(item, change) for key, item in value.named.items()}
    entry = next((r[value.name] for r in (datasets, partitions, models) if value.name in r), None)
    if entry is None:
        return replace(value, positional=positional, named=named)
    try:
        call = replace(value, positional=(), named=entry.options(positional, named))
    except InvalidValue:  # arguments that it does not have: the run will say so
        call = replace(value, positional=(), named=named)
    changed = change(call)
    unchanged = changed == call.named and positional == value.positional
    return replace(value, named=named) if unchanged else replace(call, named=changed)


def _own_modules(value: Any) -> set[str]:
    """Return the modules that a configuration names, as `package.module:name`, wherever they
    are.
    """
    if isinstance(value, Mapping):
        return set().union(*map(_own_modules, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_own_modules, value))
    if isinstance(value, Call):
        return _own_modules([f"{value.name}", value.positional, value.named, value.until])
    if not isinstance(value, str):
        return set()
    found = set(_OWN.findall(value))
    with suppress(InvalidValue):
        call = parse(value)
        if call.positional or call.named:
            found |= _own_modules(call)
    return found


def unpack(path: Path, folder: Path) -> Bundle:
    """Write the files of a bundle into a folder; they replace the files of another bundle.

    Args:
        path: The bundle, which may come from another person. All its files are checked before any
            is written.
        folder: The folder.

    Returns:
        The contents of the bundle.

    Raises:
        DataError: The file has contents that `write_bundle` does not write, or is damaged.
    """
    with reading(path, "no bundle, or a damaged one"), path.open("rb") as file:
        files = _unpacked(file.read(LARGEST + 1))
        bundle = TypeAdapter(Bundle).validate_json(files.pop("bundle.json"))
    names = [bundle.title, bundle.fedloom]
    names += [name for run in bundle.runs for name in (run.setting, run.algorithm)]
    if not all(name.isprintable() and len(name) <= _LONGEST_NAME for name in names):
        raise DataError(f"{path} is no bundle: it has names with control characters, or very long")
    digests = {name: digest(content) for name, content in files.items()}
    for name in sorted({*digests, *bundle.files}):
        if digests.get(name) != bundle.files.get(name):
            raise DataError(f"{path} is damaged: {quoted(name)} has changed since it was written")
    for name in ("runs", "code"):  # of an earlier bundle: its code must not run with this one's
        earlier = folder / name
        if earlier.is_dir() and not earlier.is_symlink():
            shutil.rmtree(earlier)
        else:
            remove(earlier)
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
        # read no more than the declared size
        return {entry.filename: archive.open(entry).read(entry.file_size) for entry in entries}
