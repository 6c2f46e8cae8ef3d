"""Checkpoints of a run and logs of its rounds, both with digests, so that nothing damaged is gone
on from.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fedloom.errors import CheckpointError, DamagedCheckpoint
from fedloom.state.digest import Checksum
from fedloom.state.files import append_line, flush, read_file, write_bytes
from fedloom.state.tensors import read_tensors, write_tensors

Record = dict[str, Any]
"""Figures of a round, ready for JSON."""

FORMAT = "3"
T = TypeVar("T")
KEPT = 2  # the newest, and the one before in case the newest turns out to be damaged


@dataclass(frozen=True)
class Checkpoint:
    """The state after `round`: the method's, the clients' memory, digests of logs by file name, and
    entries of `PoolFiles`.
    """

    round: int
    server: dict[str, Tensor]
    clients: dict[str, Tensor]
    logs: Mapping[str, str]
    pools: Mapping[str, str] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, in its directory."""

    def __init__(self, directory: Path, run: str) -> None:
        self.directory = directory
        self.run = run  # what must be the same for a checkpoint to be continued
        self.notices: list[str] = []

    def paths(self) -> list[Path]:
        """Checkpoint files, newest first."""
        return sorted(self.directory.glob("checkpoint-*.safetensors"), reverse=True)

    def rounds(self) -> list[int]:
        """Return the rounds of the checkpoint files, whether or not they can be read."""
        return [
            int(number)
            for path in self.paths()
            if (number := path.stem.removeprefix("checkpoint-")).isdecimal()
        ]

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove all but this one and the one before it."""
        tensors = _under("server/", checkpoint.server) | _under("clients/", checkpoint.clients)
        entries = _under("log ", checkpoint.logs) | _under("pool ", checkpoint.pools)
        metadata = {"format": FORMAT, "round": str(checkpoint.round), "run": self.run, **entries}
        path = self.directory / _file_name(checkpoint.round)
        write_tensors(path, tensors, metadata)
        paths = self.paths()
        at = paths.index(path)
        for needless in [*paths[:at], *paths[at + KEPT :]]:
            needless.unlink(missing_ok=True)

    def latest(self, recorded: int, adopt: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Return the newest checkpoint that can be read, that `adopt` takes, and whose rounds are
        all among the `recorded` ones that have figures. `adopt` raises `DamagedCheckpoint` where
        something that it needs beside the file is missing.

        `notices` say what was passed over, and where the run goes on. Raises `CheckpointError` for
        a checkpoint of another run.
        """
        passed: list[str] = []
        newest: Checkpoint | None = None
        for path in self.paths():
            try:
                newest = self._read(path)
                if newest.round > recorded:
                    raise DamagedCheckpoint(
                        f"{path}: only {recorded} of its {newest.round} rounds have figures"
                    )
                adopt(newest)
                break
            except DamagedCheckpoint as error:
                passed.append(str(error))
                newest = None
        instead = (
            "starting again from round 1"
            if newest is None
            else f"going on after round {newest.round}"
        )
        self.notices += [f"{reason}: {instead}" for reason in passed]
        return newest

    def _read(self, path: Path) -> Checkpoint:
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {metadata.get('format')!r}, this version reads {FORMAT!r}"
            )
        if metadata.get("run") != self.run:
            raise CheckpointError(
                f"{path} is of another run (method, settings, data or model): use another folder"
            )
        if path.name != _file_name(int(metadata["round"])):
            raise DamagedCheckpoint(
                f"{path} is of round {metadata['round']}, which is not its name"
            )
        state = below("server/", tensors), below("clients/", tensors)
        return Checkpoint(
            int(metadata["round"]), *state, below("log ", metadata), below("pool ", metadata)
        )


def _file_name(round: int) -> str:
    return f"checkpoint-{round:07d}.safetensors"


def _under(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    return {f"{prefix}{name}": value for name, value in named.items()}


def below(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return what has names that begin with the prefix, by the rest of these names."""
    return {
        name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)
    }


class RoundLog:
    """A file with one JSON line per round. A line that was cut short by a kill, or lacks one of the
    `names` that every line has, is dropped when a run resumes. Without a path the records stay in
    memory.
    """

    def __init__(self, path: Path | None = None, names: Iterable[str] = ()) -> None:
        self.path, self.name, self._names = (
            path,
            "" if path is None else path.name,
            {"round", *names},
        )
        self._in_memory: list[dict[str, Any]] = []
        self._digest = Checksum()

    @property
    def digest(self) -> str:
        """The digest of all lines since `resume`."""
        return str(self._digest.hexdigest())

    def require(self, finished: int, digest: str | None) -> None:
        """Raise `DamagedCheckpoint` unless the lines up to round `finished` are those of which this
        was the digest.
        """
        if Checksum(b"".join(map(_line, self._until(finished)))).hexdigest() != digest:
            raise DamagedCheckpoint(f"{self.path} is not as it was written, up to round {finished}")

    def read(self) -> list[dict[str, Any]]:
        """Return the lines that can be read, in the order of their rounds."""
        if self.path is None:
            return self._in_memory
        records: list[dict[str, Any]] = []
        for line in read_file(self.path).splitlines() if self.path.exists() else []:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(record, dict) or not record.keys() >= self._names:
                continue
            if isinstance(record["round"], int) and record["round"] > (
                records[-1]["round"] if records else 0
            ):
                records.append(record)
        return records

    def resume(self, finished: int) -> list[dict[str, Any]]:
        """Return the lines up to round `finished`; later and broken ones are removed from the file."""
        records = self._until(finished)
        lines = b"".join(map(_line, records))
        if self.path is not None and self.path.exists():
            write_bytes(self.path, lines)
        self._digest = Checksum(lines)
        return records

    def _until(self, finished: int) -> list[dict[str, Any]]:
        return [record for record in self.read() if record["round"] <= finished]

    def append(self, record: dict[str, Any]) -> None:
        """Write one line and hand it to the system at once. Raises `CheckpointError` when it cannot
        be written.
        """
        if self.path is None:
            self._in_memory.append(record)
        else:
            append_line(self.path, _line(record), durable=False)
        self._digest.update(_line(record))

    def sync(self) -> None:
        """Wait until every line is on the disk: a checkpoint must not outlive the figures of its
        rounds.
        """
        if self.path is not None and self.path.exists():
            flush(self.path)

    def complete(self, records: list[dict[str, Any]]) -> int:
        """Return how many rounds, from the first on, have a line each, of the `records` that were
        read.
        """
        return next(
            (k for k, record in enumerate(records) if record["round"] != k + 1), len(records)
        )


def _line(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record)}\n".encode()
