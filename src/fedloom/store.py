"""What each client remembers from round to round: control variates, personal models, stored updates.

In a simulation one `ClientStore` keeps it for the clients that were seen; on a real site the site keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class ClientStore:
    """Named tensors for each client that has written any; nothing is held for the others."""

    def __init__(self) -> None:
        self._clients: dict[int, dict[str, Tensor]] = {}

    def read(self, client: int) -> dict[str, Tensor]:
        """What the client remembers, by name; empty for a client not seen yet."""
        return self._clients.get(client, {})

    def write(self, client: int, tensors: dict[str, Tensor]) -> None:
        """Add or replace the named tensors of one client."""
        self._clients.setdefault(client, {}).update(tensors)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._clients))

    def state(self) -> dict[str, Tensor]:
        """Everything, by `client/name`, for a checkpoint."""
        return {f"{client}/{name}": t for client in self for name, t in self._clients[client].items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Replace everything by what `state` returned."""
        self._clients = {}
        for key, tensor in state.items():
            client, _, name = key.partition("/")
            self.write(int(client), {name: tensor})


class Memory:
    """The memory of a cohort's k clients as rows `[k, ...]`.

    Writes are kept aside until `commit`, so that a client that fails half-way remembers what it did before.
    """

    def __init__(self, store: ClientStore, clients: Sequence[int]) -> None:
        self._store = store
        self._clients = tuple(clients)
        self._written: dict[str, Tensor] = {}

    def get(self, name: str, default: Tensor) -> Tensor:
        """Rows `[k, ...]`; a client that remembers nothing under `name` gets its row of `default` (`[k, ...]` or `[1, ...]`)."""
        if name in self._written:
            return self._written[name]
        fallback = default.expand(len(self._clients), *default.shape[1:])
        rows = [self._store.read(client).get(name) for client in self._clients]
        if all(row is None for row in rows):
            return fallback
        return torch.stack([fallback[k] if row is None else row.to(fallback.device) for k, row in enumerate(rows)])

    def knows(self, name: str) -> Tensor:
        """Which of the clients remember something under `name`, `[k]` bool."""
        return torch.tensor([name in self._written or name in self._store.read(client) for client in self._clients])

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self._written[name] = rows.detach()

    def commit(self, kept: Sequence[int] | None = None) -> None:
        """Store what was written, for the clients at the positions `kept` (all by default)."""
        for k in range(len(self._clients)) if kept is None else kept:
            self._store.write(self._clients[k], {name: rows[k].clone() for name, rows in self._written.items()})
        self._written = {}
