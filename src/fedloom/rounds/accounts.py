"""Privacy accounts of runs over real sites: every release under differential privacy."""

from collections.abc import Iterator
from pathlib import Path

from fedloom.algorithm.method import Method, components, name_of
from fedloom.algorithm.records import Exchange
from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.parts.privacy import Accounted
from fedloom.state.released import RELEASED, Release, ReleaseLedger


class Accounts:
    """Writes every release to the ledger before the server sends a message.

    Parts count all releases in the ledger, including releases of failed and repeated rounds.
    Without a directory or without real sites there is no ledger: each part counts its own releases.
    """

    def __init__(self, method: Method, directory: Path | None, identity: str, remote: bool) -> None:
        self._method = method
        self._ledger: ReleaseLedger | None = None
        if directory is not None and remote and any(True for _ in self._accounted()):
            self._ledger = ReleaseLedger(directory / RELEASED, identity)

    def _accounted(self) -> Iterator[tuple[str, Accounted]]:
        """Yield the parts that spend privacy budget, with their names in the ledger."""
        for depth, component in enumerate(components(self._method)):
            if isinstance(component, Accounted):
                yield f"{depth}.{name_of(component)}", component

    def resume(self, shown: int) -> None:
        """Read the ledger, and check that it reaches round `shown`, the last round in the files."""
        if self._ledger is not None:
            self._ledger.resume(shown)
            self._ledger.require_methods({name for name, _ in self._accounted()})

    def record(self, exchange: Exchange) -> None:
        """Write the releases of a round to the ledger, before the round sends messages."""
        if self._ledger is not None:
            for name, part in self._accounted():
                clients = part.counted(exchange.selection)
                noise = part.noise_multiplier()
                bound = part.bound()
                release = Release(exchange.round.number, name, noise, bound, clients)
                self._ledger.append(release)

    def count(self) -> None:
        """Copy the numbers of releases from the ledger to the states of the parts."""
        if self._ledger is not None:
            for name, part in self._accounted():
                part.state["releases"] = self._ledger.counts(name, len(part.state["releases"]))
                part.earlier = self._ledger.statistics()

    def require_budget(self) -> None:
        """Raise the error of a run that has no privacy budget for its first round."""
        if self._ledger is not None and self._ledger.releases:
            reason = "lost rounds or statistics spent the budget: use another folder"
            raise CheckpointError(f"{self._ledger.path}: {reason}")
        reason = "one round costs more epsilon than target_epsilon: add more noise"
        raise InvalidValue(f"{self._method}: {reason}")
