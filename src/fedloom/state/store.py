"""Clients' memory from round to round: control variates, personal models, stored updates.

In a simulation one `ClientStore` holds it, in memory up to a budget and beyond it in files; a real
site keeps `ClientFiles`.
"""

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedloom.config.fields import require_at_least
from fedloom.state.client_files import ClientFiles, Tensors
from fedloom.state.files import flush, remove_unfinished, temporary_folder

BUDGET = 1 << 30
"""Bytes kept in memory by default."""

INLINE = 16 << 20
"""Bytes up to which a checkpoint holds all client memory itself, instead of naming files of it."""

VERSIONS = "versions"
"""Name in a checkpoint of the table `[n, 2]`: client, version of its file."""


class ClientStore:
    """Named tensors for each client that has written any.

    What a round writes can be undone until `commit`. Beyond `budget` bytes, the least recently used
    clients are moved to files. What a client writes later goes to a new version of its file,
    numbered over all clients. A checkpoint (`state`) names the versions that are current, so that
    clients that did not change cost it nothing; `release` removes the files that only older
    checkpoints needed. Without a `directory`, files lie in a temporary folder.
    """

    def __init__(self, directory: Path | None = None, budget: int = BUDGET) -> None:
        require_at_least("memory_budget", budget, 0)
        self.budget = budget
        self._directory: Path | None = None
        self._folder: Path | None = None
        self.begin(directory)

    def begin(self, directory: Path | None) -> None:
        """Forget everything and use `directory` from now on; the files in it stay until `release`."""
        if self._folder is not None and self._directory is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._directory = self._folder = directory
        self._forget()

    def _forget(self) -> None:
        """Hold nothing in memory, and number new files after those in the directory."""
        existing: set[tuple[int, int]] = set()
        if self._directory is not None:
            remove_unfinished(self._directory)
            existing = self._files().scan()
        self._in_memory: dict[int, Tensors] = {}  # least recently used first
        self._undo: dict[int, Tensors] = {}  # before this round's writes
        self._undoable = True
        self._memory_bytes = self._undo_bytes = 0
        # of each client's file, where one holds what it remembers
        self._versions: dict[int, int] = {}
        self._next = 1 + max((version for _, version in existing), default=0)
        # older versions are on the disk, and may belong to a checkpoint
        self._checkpointed = self._next
        # needed by the newest checkpoint, but not by the next one
        self._superseded: list[tuple[int, int]] = []
        self._outdated = list(existing)  # needed by no checkpoint after the next one

    # --- what clients remember ---

    def read(self, client: int) -> Tensors:
        """Return everything the client remembers, by name and not to be changed in place; empty
        where it has written nothing.
        """
        tensors = self._in_memory.pop(client, None)
        if tensors is None:
            if client not in self._versions:
                return {}
            tensors = self._files().read(client, self._versions[client])
            self._memory_bytes += _bytes(tensors)
        self._in_memory[client] = tensors  # the most recently used one comes last
        self._spill()
        return tensors

    def write(self, client: int, tensors: Tensors) -> None:
        """Add or replace named tensors of one client, which the caller must not change any more."""
        remembered = self.read(client)
        if self._undoable and client not in self._undo:
            self._undo[client] = remembered
            self._undo_bytes += _bytes(remembered)
            # the round is repeated from a checkpoint instead
            if self._undo_bytes > self.budget // 2:
                self._undo, self._undo_bytes, self._undoable = {}, 0, False
        self._put(client, {**remembered, **tensors})
        self._spill()

    def commit(self) -> None:
        """Keep what the round wrote."""
        self._undo, self._undo_bytes, self._undoable = {}, 0, True

    def rollback(self) -> bool:
        """Undo what was written since `commit`. Returns False when some of it cannot be undone."""
        undo, self._undo, self._undo_bytes = self._undo, {}, 0
        for client, tensors in undo.items():
            self._put(client, tensors)
        return self._undoable

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._in_memory, *self._versions}))

    # --- memory and files ---

    def _put(self, client: int, tensors: Tensors) -> None:
        """Replace all that the client remembers."""
        self._memory_bytes += _bytes(tensors) - _bytes(self._in_memory.pop(client, {}))
        if tensors:
            self._in_memory[client] = tensors
        version = self._versions.pop(client, None)
        if version is not None and version < self._checkpointed:
            self._superseded.append((client, version))
        elif version is not None:
            self._files().remove(client, version)

    def _spill(self) -> None:
        """Move the least recently used clients to files until the others fit the budget."""
        while self._in_memory and self._undo_bytes + self._memory_bytes > self.budget:
            client = next(iter(self._in_memory))
            self._write_file(client)
            self._memory_bytes -= _bytes(self._in_memory.pop(client))

    def _write_file(self, client: int) -> None:
        if client not in self._versions:
            version, self._next = self._next, self._next + 1
            self._files().write(client, version, self._in_memory[client], durable=False)
            self._versions[client] = version

    def _files(self) -> ClientFiles:
        self._folder = self._folder or temporary_folder(self, "clients")
        return ClientFiles(self._folder)

    # --- checkpoints ---

    def state(self) -> Tensors:
        """Return what a checkpoint must hold: everything by `client/name` while that is little,
        else the current versions.

        The files of these versions are on the disk when it returns, and stay until two newer
        checkpoints have been released.
        """
        if not self._versions and self._memory_bytes <= INLINE:
            memory = sorted(self._in_memory.items())
            return {
                f"{client}/{name}": tensor
                for client, tensors in memory
                for name, tensor in tensors.items()
            }
        for client in self._in_memory:
            self._write_file(client)
        files = self._files()
        for client, version in self._versions.items():
            if version >= self._checkpointed:
                flush(files.path(client, version))
        flush(files.folder)
        self._checkpointed = self._next
        return {VERSIONS: torch.tensor(sorted(self._versions.items()), dtype=torch.int64)}

    def release(self) -> None:
        """Remove the files that no checkpoint needs any more, now that one with the last `state` is
        on the disk.
        """
        for file in self._outdated:
            self._files().remove(*file)
        self._outdated, self._superseded = self._superseded, []

    def restore(self, state: Tensors) -> None:
        """Replace everything by a `state`, reading its files. Raises `DamagedCheckpoint`, and
        forgets all, if one is damaged.
        """
        self._forget()
        versions = dict(state.get(VERSIONS, torch.empty(0, 2, dtype=torch.int64)).tolist())
        for client, version in versions.items():
            self._files().read(client, version)
        self._versions = versions
        self._outdated = [file for file in self._outdated if versions.get(file[0]) != file[1]]
        for key, tensor in state.items():
            if key != VERSIONS:
                client_text, _, name = key.partition("/")
                self._in_memory.setdefault(int(client_text), {})[name] = tensor
        self._memory_bytes = sum(map(_bytes, self._in_memory.values()))
        self._spill()

    def close(self) -> None:
        """Forget everything and remove the temporary folder, if there is one."""
        self.begin(None)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class Memory:
    """A cohort's memory as rows `[k, ...]`. Nothing is written before `commit`, so that a client
    that fails keeps what it had.
    """

    def __init__(self, store: ClientStore, clients: Sequence[int]) -> None:
        self._store = store
        self._clients = tuple(clients)
        # rows, and a mask of the clients that write theirs
        self._written: dict[str, tuple[Tensor, Tensor]] = {}
        # the same of rows that are not read back in this round
        self._unread: dict[str, tuple[Tensor, Tensor]] = {}
        self._mask = torch.ones(len(self._clients), dtype=torch.bool)

    def shielded(self, clients: Tensor) -> "Memory":
        """Return the same memory for all clients, in which those in the mask `clients [k]` alone
        write.
        """
        memory = copy.copy(self)
        memory._mask = clients & self._mask
        return memory

    def get(self, name: str, default: Tensor) -> Tensor:
        """Return what the clients remember under a name.

        Args:
            name: Name of the tensor.
            default: `[k, ...]` or `[1, ...]`, the rows of clients that remember nothing under this
                name.

        Returns:
            Rows `[k, ...]`, those of `write` left out until the next round.
        """
        if name in self._written:
            return self._written[name][0]
        fallback = default.expand(len(self._clients), *default.shape[1:])
        rows = [self._store.read(client).get(name) for client in self._clients]
        if all(row is None for row in rows):
            return fallback
        return torch.stack(
            [fallback[k] if row is None else row.to(fallback.device) for k, row in enumerate(rows)]
        )

    def knows(self, name: str) -> Tensor:
        """Return a mask `[k]` of the clients that remember something under `name`."""
        return torch.tensor(
            [name in self._written or name in self._store.read(client) for client in self._clients]
        )

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._written[name] = rows.detach(), self._mask

    def write(self, name: str, rows: Tensor, clients: Tensor) -> None:
        """Write rows `[k, ...]` for the clients in the mask `clients [k]` alone. They are read back
        from the next round on.
        """
        self._unread[name] = rows.detach(), clients & self._mask

    def commit(self, positions: Sequence[int] | None = None) -> None:
        """Store what was written, for the clients at these positions (all by default)."""
        for k in range(len(self._clients)) if positions is None else positions:
            entries = (*self._written.items(), *self._unread.items())
            written = {name: rows[k].clone() for name, (rows, mask) in entries if mask[k]}
            if written:
                self._store.write(self._clients[k], written)
        self._written, self._unread = {}, {}
