"""Clients' memory from round to round: control variates, personal models, stored updates.

In a simulation one `ClientStore` stores it, in memory up to a budget and above it in files. A real
site uses `ClientFiles`.
"""

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedloom.common.fields import require_at_least
from fedloom.state.client_files import ClientFiles, Tensors
from fedloom.state.files import flush, remove_unfinished, temporary_folder

BUDGET = 1 << 30
"""Default size of the clients' memory in RAM, in bytes."""

INLINE = 16 << 20
"""Bytes of client memory up to which a checkpoint contains it, instead of naming files."""

VERSIONS = "versions"
"""Name in a checkpoint of the table `[n, 2]`: client, version of its file."""


class ClientStore:
    """Named tensors for each client that has written any.

    The writes of a round can be undone until `commit`. Above `budget` bytes, the least recently
    used clients are moved to files. Later writes of a client go to a new version of its file,
    numbered over all clients. A checkpoint (`state`) names the current versions, so unchanged
    clients cost it nothing. `release` removes the files that only older checkpoints needed. Without
    a `directory`, files are in a temporary folder.
    """

    def __init__(self, directory: Path | None = None, budget: int = BUDGET) -> None:
        require_at_least("memory_budget", budget, 0)
        self.budget = budget
        self._directory: Path | None = None
        self._folder: Path | None = None
        self.begin(directory)

    def begin(self, directory: Path | None) -> None:
        """Forget everything and use `directory` from now on; its files stay until `release`."""
        if self._folder is not None and self._directory is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._directory = self._folder = directory
        self._forget()

    def _forget(self) -> None:
        """Empty the memory, and number new files after those in the directory."""
        existing: set[tuple[int, int]] = set()
        if self._directory is not None:
            remove_unfinished(self._directory)
            existing = self._files().scan()
        self._in_memory: dict[int, Tensors] = {}  # least recently used first
        self._undo: dict[int, Tensors] = {}  # before this round's writes
        self._undoable = True
        self._memory_bytes = self._undo_bytes = 0
        # version of each client's file, if the file has its current memory
        self._versions: dict[int, int] = {}
        self._next = 1 + max((version for _, version in existing), default=0)
        # older versions are on the disk, and may belong to a checkpoint
        self._checkpointed = self._next
        # needed by the newest checkpoint, but not by the next one
        self._superseded: list[tuple[int, int]] = []
        self._outdated = list(existing)  # needed by no checkpoint after the next one

    # --- memory of clients ---

    def read(self, client: int) -> Tensors:
        """Return a client's tensors by name; empty if it has written none.

        The caller must not change them in place.
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
        """Add or replace named tensors of one client.

        Args:
            client: Number of the client.
            tensors: Tensors by name; the client's other tensors remain. The caller must not change
                them any more.
        """
        remembered = self.read(client)
        if self._undoable and client not in self._undo:
            self._undo[client] = remembered
            self._undo_bytes += _bytes(remembered)
            # the round is repeated from a checkpoint instead
            if self._undo_bytes > self.budget // 2:
                self._undo = {}
                self._undo_bytes = 0
                self._undoable = False
        self._put(client, {**remembered, **tensors})
        self._spill()

    def commit(self) -> None:
        """Make the writes of the round permanent."""
        self._undo = {}
        self._undo_bytes = 0
        self._undoable = True

    def rollback(self) -> bool:
        """Undo all writes since `commit`. Return False if some cannot be undone."""
        undo = self._undo
        self._undo = {}
        self._undo_bytes = 0
        for client, tensors in undo.items():
            self._put(client, tensors)
        return self._undoable

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({*self._in_memory, *self._versions}))

    # --- memory and files ---

    def _put(self, client: int, tensors: Tensors) -> None:
        """Replace all tensors of a client."""
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
            version = self._next
            self._next = self._next + 1
            self._files().write(client, version, self._in_memory[client], durable=False)
            self._versions[client] = version

    def _files(self) -> ClientFiles:
        self._folder = self._folder or temporary_folder(self, "clients")
        return ClientFiles(self._folder)

    # --- checkpoints ---

    def state(self) -> Tensors:
        """Return the tensors for a checkpoint.

        These are all tensors, by `client/name`, if they are small, and otherwise the current
        versions. The files of these versions are on the disk when this returns, and stay until two
        newer checkpoints have been released.
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
        """Remove the files that no checkpoint needs any more.

        Called when a checkpoint with the last `state` is on the disk.
        """
        for file in self._outdated:
            self._files().remove(*file)
        self._outdated = self._superseded
        self._superseded = []

    def restore(self, state: Tensors) -> None:
        """Replace everything by a `state`, and read its files.

        Raises:
            DamagedCheckpoint: A file is damaged; then everything is forgotten.
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
        """Forget everything and remove the temporary folder."""
        self.begin(None)


def _bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class Memory:
    """A cohort's memory as rows `[k, ...]`.

    Rows are stored only at `commit`, so the memory of a client that fails does not change.
    """

    def __init__(self, store: ClientStore, clients: Sequence[int]) -> None:
        self._store = store
        self._clients = tuple(clients)
        # rows, and a mask of the clients that write them
        self._written: dict[str, tuple[Tensor, Tensor]] = {}
        # the same, for rows that are not read back in this round
        self._unread: dict[str, tuple[Tensor, Tensor]] = {}
        self._mask = torch.ones(len(self._clients), dtype=torch.bool)

    def shielded(self, clients: Tensor) -> "Memory":
        """Return the same memory, in which only the clients in the mask `clients [k]` write."""
        memory = copy.copy(self)
        memory._mask = clients & self._mask
        return memory

    def get(self, name: str, default: Tensor) -> Tensor:
        """Return the clients' rows under a name.

        Args:
            name: Name of the tensor.
            default: Rows of clients without this tensor, `[k, ...]` or `[1, ...]`.

        Returns:
            Rows `[k, ...]`; rows of `write` are included from the next round on.
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
        """Return a mask `[k]` of the clients that have a tensor `name`."""
        return torch.tensor(
            [name in self._written or name in self._store.read(client) for client in self._clients]
        )

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._written[name] = rows.detach(), self._mask

    def write(self, name: str, rows: Tensor, clients: Tensor) -> None:
        """Write rows for some clients. They are read back from the next round on.

        Args:
            name: Name of the tensor.
            rows: `[k, ...]`.
            clients: Mask `[k]` of the clients that write.
        """
        self._unread[name] = rows.detach(), clients & self._mask

    def commit(self, positions: Sequence[int] | None = None) -> None:
        """Store the written rows, for the clients at these positions (all by default)."""
        for k in range(len(self._clients)) if positions is None else positions:
            entries = (*self._written.items(), *self._unread.items())
            written = {name: rows[k].clone() for name, (rows, mask) in entries if mask[k]}
            if written:
                self._store.write(self._clients[k], written)
        self._written = {}
        self._unread = {}
