"""Checkpoints of a run and logs of its rounds.

Both have digests, so that a run never continues from damaged files.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from fedloom.common.digest import Checksum
from fedloom.common.errors import CheckpointError, DamagedCheckpoint
from fedloom.state.files import append_line, flush, read_file, write_bytes
from fedloom.state.tensors import read_tensors, write_tensors

Record = dict[str, Any]
"""Figures of a round, ready for JSON."""

FORMAT = "3"
T = TypeVar("T")
RETAINED = 2  # the newest checkpoint, and the previous one in case the newest is damaged


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        round: Number of the round.
        server: State of the method by path.
        clients: Memory of the clients, as the engine returns it.
        logs: Digests of the logs by file name.
        pools: Entries of `PoolFiles` by path of the state.
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
        self.run = run  # identity: a run only continues from checkpoints with the same one
        self.notices: list[str] = []

    def paths(self) -> list[Path]:
        """Checkpoint files, newest first."""
        return sorted(self.directory.glob("checkpoint-*.safetensors"), reverse=True)

    def rounds(self) -> list[int]:
        """Return the rounds of the checkpoint files, including files that cannot be read."""
        return [
            int(number)
            for path in self.paths()
            if (number := path.stem.removeprefix("checkpoint-")).isdecimal()
        ]

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove all others except the previous one."""
        tensors = _add_prefix("server/", checkpoint.server) | _add_prefix(
            "clients/", checkpoint.clients
        )
        entries = _add_prefix("log ", checkpoint.logs) | _add_prefix("pool ", checkpoint.pools)
        metadata = {"format": FORMAT, "round": str(checkpoint.round), "run": self.run, **entries}
        path = self.directory / _file_name(checkpoint.round)
        write_tensors(path, tensors, metadata)
        paths = self.paths()
        at = paths.index(path)
        for obsolete in [*paths[:at], *paths[at + RETAINED :]]:
            obsolete.unlink(missing_ok=True)

    def latest(self, recorded: int, adopt: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Return the newest valid checkpoint, and add a notice for each checkpoint that is skipped.

        Args:
            recorded: Number of rounds, from the first, that have figures. Later checkpoints are
                skipped.
            adopt: Restores the state of the run. Raises `DamagedCheckpoint` if another file that
                it needs is missing or damaged.

        Returns:
            The checkpoint, or None if no checkpoint is valid.

        Raises:
            CheckpointError: If a checkpoint belongs to another run.
        """
        reasons: list[str] = []
        newest: Checkpoint | None = None
        for path in self.paths():
            try:
                newest = self._read(path)
                if newest.round > recorded:
                    raise DamagedCheckpoint(
                        f"{path}: only {recorded} of {newest.round} rounds have figures"
                    )
                adopt(newest)
                break
            except DamagedCheckpoint as error:
                reasons.append(str(error))
                newest = None
        restart = "starting again from round 1"
        consequence = restart if newest is None else f"continuing after round {newest.round}"
        self.notices += [f"{reason}: {consequence}" for reason in reasons]
        return newest

    def _read(self, path: Path) -> Checkpoint:
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {metadata.get('format')!r}; this version reads {FORMAT!r}"
            )
        if metadata.get("run") != self.run:
            raise CheckpointError(
                f"{path} belongs to another run (method, settings, data or model differ): "
                "use another folder"
            )
        if path.name != _file_name(int(metadata["round"])):
            raise DamagedCheckpoint(
                f"{path} contains round {metadata['round']}, but has the name of another round"
            )
        state = entries_below("server/", tensors), entries_below("clients/", tensors)
        return Checkpoint(
            int(metadata["round"]),
            *state,
            entries_below("log ", metadata),
            entries_below("pool ", metadata),
        )


def _file_name(round: int) -> str:
    return f"checkpoint-{round:07d}.safetensors"


def _add_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    return {f"{prefix}{name}": value for name, value in named.items()}


def entries_below(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return the entries with names that begin with a prefix.

    Args:
        prefix: The prefix. It is removed from the names.
        named: Entries by name.

    Returns:
        Entries by shortened name; empty if none begins with the prefix.
    """
    return {
        name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)
    }


class RoundLog:
    """A file with one JSON line per round.

    When a run resumes, incomplete lines are removed: a kill may have cut a line, or a line lacks
    one of the required `names`.

    Args:
        path: The file. None stores the records in memory.
        names: Names that every line must have.
    """

    def __init__(self, path: Path | None = None, names: Iterable[str] = ()) -> None:
        self.path = path
        self.name = "" if path is None else path.name
        self._names = {"round", *names}
        self._in_memory: list[dict[str, Any]] = []
        self._digest = Checksum()

    @property
    def digest(self) -> str:
        """The digest of all lines since `resume`."""
        return str(self._digest.hexdigest())

    def require(self, finished: int, digest: str | None) -> None:
        """Check the lines of the log.

        Args:
            finished: Last round of the lines that are checked.
            digest: Expected digest of these lines.

        Raises:
            DamagedCheckpoint: If the lines have another digest.
        """
        if Checksum(b"".join(map(_line, self._until(finished)))).hexdigest() != digest:
            raise DamagedCheckpoint(
                f"{self.path} has changed since it was written, up to round {finished}"
            )

    def read(self) -> list[dict[str, Any]]:
        """Return the readable lines, in the order of their rounds."""
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
        """Return the lines up to round `finished`, and remove all other lines from the file."""
        records = self._until(finished)
        lines = b"".join(map(_line, records))
        if self.path is not None and self.path.exists():
            write_bytes(self.path, lines)
        self._digest = Checksum(lines)
        return records

    def _until(self, finished: int) -> list[dict[str, Any]]:
        return [record for record in self.read() if record["round"] <= finished]

    def append(self, record: dict[str, Any]) -> None:
        """Write one line without buffering. Raises `CheckpointError` if this fails."""
        if self.path is None:
            self._in_memory.append(record)
        else:
            append_line(self.path, _line(record), durable=False)
        self._digest.update(_line(record))

    def sync(self) -> None:
        """Wait until every line is on the disk, so that a checkpoint never outlives its figures."""
        if self.path is not None and self.path.exists():
            flush(self.path)

    def complete(self, records: list[dict[str, Any]]) -> int:
        """Return the number of rounds, from the first, that have a line each in `records`."""
        return next(
            (k for k, record in enumerate(records) if record["round"] != k + 1), len(records)
        )


def _line(record: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(record)}\n".encode()
