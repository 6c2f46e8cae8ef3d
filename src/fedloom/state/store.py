"""What each client remembers from round to round: control variates, personal models, stored updates.

In a simulation one `ClientStore` keeps it for the clients that were seen, in memory up to a budget and beyond it in files; on a
real site the site keeps its own.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedloom.config.checks import require_at_least
from fedloom.errors import DamagedCheckpoint
from fedloom.state.files import flush, flush_directory, remove_unfinished
from fedloom.state.tensors import read_tensors, write_tensors

BUDGET = 1 << 30
"""Bytes kept in memory by default. Beyond it, files that were used lately are still in the system's cache."""

INLINE = 16 << 20
"""Bytes up to which a checkpoint holds all client memory itself, instead of naming files of it."""

VERSIONS = "versions"
"""Name in a checkpoint of the table `[n, 2]`: client, version of its file."""

_NAME = re.compile(r"client-(\d+)\.v(\d+)\.safetensors")

Tensors = dict[str, Tensor]


class ClientStore:
    """Named tensors for each client that has written any.

    What a round writes is pending until `commit`, and can be undone before that. Beyond `budget` bytes, the least recently used
    clients are moved to files, `client-000123.v7.safetensors`. A file is never changed: what a client writes later goes to a new
    version of it, numbered over all clients. A checkpoint (`state`) names the versions that are current, so that clients that
    did not change cost it nothing; `release` removes the files that only older checkpoints needed. Without a `directory`, files
    lie in a temporary folder.
    """

    def __init__(self, directory: Path | None = None, budget: int = BUDGET) -> None:
        require_at_least("memory_budget", budget, 0)
        self.budget = budget
        self._temporary: Path | None = None
        self.begin(directory)

    def begin(self, directory: Path | None) -> None:
        """Forget everything and use `directory` from now on; the files in it stay until `release`."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary = None
        self.directory = directory
        self._forget(self._scan())

    def _forget(self, found: set[tuple[int, int]]) -> None:
        """Hold nothing in memory, and number new files after those that were `found`."""
        self._pending: dict[int, Tensors] = {}
        self._held: dict[int, Tensors] = {}  # least recently used first
        self._pending_bytes = self._held_bytes = 0
        self._undoable = True
        self._files: dict[int, int] = {}  # the version of each client's file, where one holds what it remembers
        self._unflushed: dict[int, int] = {}  # files, version to client, that may not have reached the disk
        self._next = 1 + max((version for _, version in found), default=0)
        self._checkpointed = self._next  # versions before this one may belong to a checkpoint
        self._superseded: list[Path] = []  # needed by the newest checkpoint, but not by the next one
        self._outdated = [self._path(*file) for file in found]  # needed by no checkpoint after the next one

    # --- what clients remember ---

    def get(self, client: int, name: str) -> Tensor | None:
        """What the client remembers under `name`, or None; not to be changed in place."""
        return self.read(client).get(name)

    def names(self, client: int) -> set[str]:
        """The names under which the client remembers something."""
        return set(self.read(client))

    def read(self, client: int) -> Tensors:
        """Everything the client remembers, by name; empty for a client not seen yet."""
        return {**self._stored(client), **self._pending.get(client, {})}

    def write(self, client: int, tensors: Tensors) -> None:
        """Add or replace the named tensors of one client, which the caller must not change any more. Pending until `commit`."""
        before = self._pending.get(client, {})
        self._pending[client] = {**before, **tensors}
        self._pending_bytes += _bytes(self._pending[client]) - _bytes(before)
        if self._pending_bytes > self.budget // 2:
            self._undoable = False  # a round that needs so much memory is repeated from a checkpoint instead
            self._settle()
        self._spill()

    def commit(self) -> None:
        """The round is over: keep what was written."""
        self._settle()
        self._spill()
        self._undoable = True

    def rollback(self) -> bool:
        """The round failed: forget what was written since `commit`. Returns False when part of it was already merged."""
        self._pending, self._pending_bytes = {}, 0
        return self._undoable

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._pending, *self._held, *self._files}))

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors kept in memory."""
        return self._pending_bytes + self._held_bytes

    # --- memory and files ---

    def _stored(self, client: int) -> Tensors:
        """What the client remembers without what is pending, brought back into memory if it lies in a file."""
        if client not in self._held and client not in self._files:
            return {}
        tensors = self._held.pop(client, None)
        if tensors is None:
            tensors = self._read_file(client)
            self._held_bytes += _bytes(tensors)
        self._held[client] = tensors  # the most recently used one comes last
        self._spill()
        return tensors

    def _settle(self) -> None:
        """Merge what is pending into what the clients remember."""
        for client, written in self._pending.items():
            merged = {**self._stored(client), **written}
            self._held_bytes += _bytes(merged) - _bytes(self._held.pop(client, {}))
            self._held[client] = merged
            if client in self._files:
                self._supersede(client)
        self._pending, self._pending_bytes = {}, 0

    def _supersede(self, client: int) -> None:
        version = self._files.pop(client)
        self._unflushed.pop(version, None)
        if version < self._checkpointed:
            self._superseded.append(self._path(client, version))
        else:
            self._path(client, version).unlink(missing_ok=True)

    def _spill(self) -> None:
        """Move the least recently used clients to files until the rest fits the budget."""
        while self._held and self.held_bytes > self.budget:
            client = next(iter(self._held))
            if client not in self._files:
                self._write_file(client)
            self._held_bytes -= _bytes(self._held.pop(client))

    def _write_file(self, client: int) -> None:
        version, self._next = self._next, self._next + 1
        self._folder().mkdir(parents=True, exist_ok=True)
        about = {"client": str(client), "version": str(version)}
        write_tensors(self._path(client, version), self._held[client], about, durable=False)
        self._files[client] = version
        self._unflushed[version] = client

    def _read_file(self, client: int) -> Tensors:
        version = self._files[client]
        return read_tensors(self._path(client, version), client=str(client), version=str(version))[0]

    def _path(self, client: int, version: int) -> Path:
        return self._folder() / f"client-{client:06d}.v{version}.safetensors"

    def _folder(self) -> Path:
        if self.directory is not None:
            return self.directory
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="fedloom-clients-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def _scan(self) -> set[tuple[int, int]]:
        """Client and version of each file in the directory. Unfinished files are removed."""
        if self.directory is None or not self.directory.exists():
            return set()
        remove_unfinished(self.directory)
        names = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return {(int(match[1]), int(match[2])) for match in names if match}

    # --- checkpoints ---

    def state(self) -> Tensors:
        """What a checkpoint must hold: everything by `client/name` while that is little, else the versions that are current.

        The files of these versions are on the disk when it returns, and stay until two newer checkpoints have been released.
        """
        self._settle()
        if not self._files and self._held_bytes <= INLINE:
            return {f"{client}/{name}": t for client in sorted(self._held) for name, t in self._held[client].items()}
        for client in self._held:
            if client not in self._files:
                self._write_file(client)
        for version, client in self._unflushed.items():
            flush(self._path(client, version))
        flush_directory(self._folder())
        self._unflushed = {}
        self._checkpointed = self._next
        return {VERSIONS: torch.tensor(sorted(self._files.items()), dtype=torch.int64)}

    def release(self) -> None:
        """A checkpoint with the last `state` is on the disk: remove the files that only checkpoints before the previous one
        needed."""
        for path in self._outdated:
            path.unlink(missing_ok=True)
        self._outdated, self._superseded = self._superseded, []

    def restore(self, state: Tensors) -> None:
        """Replace everything by what `state` returned.

        Reads all files that it names. Raises `DamagedCheckpoint`, and then forgets everything, when one is missing or damaged.
        """
        found = self._scan()
        self._forget(found)
        self._files = dict(state.get(VERSIONS, torch.empty(0, 2, dtype=torch.int64)).tolist())
        try:
            for client in self._files:
                self._read_file(client)
        except DamagedCheckpoint:
            self._files = {}
            raise
        self._outdated = [self._path(*file) for file in found if self._files.get(file[0]) != file[1]]
        for key, tensor in state.items():
            if key != VERSIONS:
                client_text, _, name = key.partition("/")
                self._held.setdefault(int(client_text), {})[name] = tensor
        self._held_bytes = sum(_bytes(tensors) for tensors in self._held.values())
        self._spill()

    def close(self) -> None:
        """Forget everything and remove the temporary folder, if there is one."""
        self.begin(None)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


class Memory:
    """The memory of a cohort's k clients as rows `[k, ...]`. Nothing is written before `commit`, so that a client that fails
    remembers what it did before."""

    def __init__(self, store: ClientStore, clients: Sequence[int]) -> None:
        self._store = store
        self._clients = tuple(clients)
        self._written: Tensors = {}
        self._partly: dict[str, tuple[Tensor, Tensor]] = {}  # rows, and which of the clients write theirs

    def get(self, name: str, default: Tensor) -> Tensor:
        """Rows `[k, ...]`; a client that remembers nothing under `name` gets its row of `default` (`[k, ...]` or `[1, ...]`)."""
        if name in self._written:
            return self._written[name]
        fallback = default.expand(len(self._clients), *default.shape[1:])
        rows = [self._store.get(client, name) for client in self._clients]
        if all(row is None for row in rows):
            return fallback
        return torch.stack([fallback[k] if row is None else row.to(fallback.device) for k, row in enumerate(rows)])

    def knows(self, name: str) -> Tensor:
        """Which of the clients remember something under `name`, `[k]` bool."""
        return torch.tensor([name in self._written or name in self._store.names(client) for client in self._clients])

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._written[name] = rows.detach()

    def write(self, name: str, rows: Tensor, clients: Tensor) -> None:
        """Write rows for the clients marked in `clients [k]` alone. They are read back from the next round on."""
        self._partly[name] = rows.detach(), clients

    def commit(self, kept: Sequence[int] | None = None) -> None:
        """Store what was written, for the clients at the positions `kept` (all by default)."""
        for k in range(len(self._clients)) if kept is None else kept:
            written = {name: rows[k].clone() for name, rows in self._written.items()}
            written |= {name: rows[k].clone() for name, (rows, clients) in self._partly.items() if clients[k]}
            self._store.write(self._clients[k], written)
        self._written, self._partly = {}, {}
