"""Files of a run: logs, checkpoints, client memory, pools and the ledger of privacy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fedloom.algorithm.method import Method
from fedloom.rounds.accounts import Accounts
from fedloom.rounds.checkpoint import Checkpoint, Checkpoints, Record, RoundLog
from fedloom.rounds.engine import Engine, RemoteClients
from fedloom.rounds.observer import Observer
from fedloom.state.files import remove_unfinished
from fedloom.state.pool_files import PoolFiles

LOGS = {
    "metrics.jsonl": (),
    "timings.jsonl": ("ended", "seconds", "train_seconds"),
    "clients.jsonl": (),
    "client_metrics.jsonl": ("clients",),
}
"""Files of a run with one line per round, and the names that every line must have."""


class Resumed(NamedTuple):
    """State of a run that continues.

    Attributes:
        finished: Number of finished rounds.
        state: Tensors of the server by path; None without a checkpoint.
        history: Figures of the finished rounds.
        timings: Times of these rounds.
    """

    finished: int
    state: dict[str, Tensor] | None
    history: list[Record]
    timings: list[Record]


class Archive:
    """Logs, checkpoints and privacy accounts of a federation.

    Args:
        method: The whole method, with all stages.
        directory: Folder of the run. None stores the logs in memory, and saves no checkpoints.
        identity: Text that identifies the run. Checkpoints of other runs are refused.
        engine: Provides the clients' memory.
        pools: Files of large matrices.
        observers: Record data of each round in additional logs.

    Attributes:
        checkpoints: Checkpoints in the directory, if any.
        accounts: Privacy accounts.
    """

    def __init__(
        self,
        method: Method,
        directory: Path | None,
        identity: str,
        engine: Engine,
        pools: PoolFiles,
        observers: Sequence[Observer],
    ) -> None:
        self.engine = engine
        self.pools = pools
        self.observers = observers
        self.checkpoints = None if directory is None else Checkpoints(directory, identity)
        self.accounts = Accounts(method, directory, identity, isinstance(engine, RemoteClients))
        self._logs = {
            name: RoundLog(None if directory is None else directory / name, names)
            for name, names in LOGS.items()
        }

    def lines(self, name: str) -> list[Record]:
        """Return the lines of a log. With a directory, each call reads the file."""
        return self._logs[name].read()

    def append(
        self, record: Record, timing: Record, clients: Record | None, metrics: Record | None
    ) -> None:
        """Write the lines of a round.

        Args:
            record: Figures of the round.
            timing: Times of the round.
            clients: Figures by client, or None if the round has not measured them.
            metrics: Figures of the training by client, or None.
        """
        lines = (record, timing, clients, metrics)
        for log, line in zip(self._logs.values(), lines, strict=True):
            if line is not None:
                log.append(line)

    def save(self, finished: int, state: Mapping[str, Tensor]) -> None:
        """Write a checkpoint, then remove the files that only older checkpoints needed.

        Logs and client memory are written first, because the checkpoint refers to them.

        Args:
            finished: Number of finished rounds.
            state: Tensors of the server by path.
        """
        if self.checkpoints is None:
            return
        logs = self._checked_logs()
        for log in logs:
            log.sync()
        pools = {
            name: file
            for name, tensor in state.items()
            if (file := self.pools.write(tensor)) is not None
        }
        server = {name: tensor for name, tensor in state.items() if name not in pools}
        digests = {log.name: log.digest for log in logs}
        self.checkpoints.save(Checkpoint(finished, server, self.engine.memory(), digests, pools))
        self.pools.keep(pools.values())
        self.engine.release_memory()

    def resume(self) -> Resumed | None:
        """Return the state of the newest valid checkpoint; None without a directory.

        Lines of later rounds are removed from all logs.
        """
        if self.checkpoints is None:
            return None
        remove_unfinished(self.checkpoints.directory)
        observed = self._observed()
        logs = [self._logs["metrics.jsonl"], *observed]
        lines = [log.read() for log in logs]
        logged = [record["round"] for record in lines[0]]
        self.accounts.resume(max([0, *logged, *self.checkpoints.rounds()]))
        recorded = [log.complete(read) for log, read in zip(logs, lines, strict=True)]
        checkpoint = self.checkpoints.latest(min(recorded), self._adopt)
        finished = 0 if checkpoint is None else checkpoint.round
        history, timings, *_ = [log.resume(finished) for log in self._logs.values()]
        for log in observed:
            log.resume(finished)
        if checkpoint is None:
            return Resumed(finished, None, history, timings)
        self.pools.keep(checkpoint.pools.values())
        return Resumed(finished, checkpoint.server, history, timings)

    def _checked_logs(self) -> list[RoundLog]:
        """Return the logs that must match a checkpoint: no times, and no figures of training."""
        return [self._logs["metrics.jsonl"], self._logs["clients.jsonl"], *self._observed()]

    def _observed(self) -> list[RoundLog]:
        """Return the logs of the observers that store something."""
        return [observer.log for observer in self.observers if observer.log is not None]

    def _adopt(self, checkpoint: Checkpoint) -> None:
        """Check the logs, and read the pools and the clients' memory of a checkpoint."""
        for log in self._checked_logs():
            log.require(checkpoint.round, checkpoint.logs.get(log.name))
        written = {name: self.pools.read(file) for name, file in checkpoint.pools.items()}
        checkpoint.server.update(written)
        self.engine.restore_memory(checkpoint.clients)
