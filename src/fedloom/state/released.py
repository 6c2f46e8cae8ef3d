"""Ledger of the releases of a run under differential privacy, separate from its checkpoints.

Over real sites the noise of a round is not drawn from the run's streams. Therefore a round that is
repeated after a kill, or from an older checkpoint, is a second release. Its cost must survive all
damage that the run survives. So each round is written here, and is on the disk, before any of its
results are released.
"""

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.common.digest import digest
from fedloom.common.errors import CheckpointError
from fedloom.state.files import append_line, read_file

RELEASED = "released.jsonl"
"""Name of the file."""

CUT_SHORT = "cut short"
"""Method of a release with an incomplete line."""

STATISTICS = "statistics"
"""Method of the statistics of the sites' columns before round 1.

All of their numbers together are one release.
"""


@dataclass(frozen=True)
class Release:
    """A release that a round is about to make.

    Attributes:
        round: Number of the round; 0 for statistics.
        method: Name of the wrapper that adds the noise.
        noise: Standard deviation in units of the clip.
        clip: Largest norm of a contribution.
        clients: Clients that it costs. None: all clients, if participants must stay secret.
    """

    round: int
    method: str
    noise: float
    clip: float
    clients: tuple[int, ...] | None = None


class ReleaseLedger:
    """Append-only file of releases, with a line of JSON each.

    A line's digest covers all lines before it. From the first round on it also covers the run's
    identity; earlier statistics do not depend on it, since they can be requested without a run.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.releases: list[Release] = []
        self._digest = ""
        self._start = digest(f"fedloom releases {identity}")

    def resume(self, evidence: int) -> None:
        """Read the releases of an earlier start.

        An incomplete last line counts as a release that costs every client.

        Args:
            evidence: Last round of which the run's directory contains a result.

        Raises:
            CheckpointError: A line is missing or was changed, or the ledger ends before round
                `evidence`.
        """
        self.releases = []
        self._digest = ""
        try:
            content = read_file(self.path) if os.path.lexists(self.path) else b""
        except OSError as error:
            raise self._refusal(f"cannot be read ({error.strerror or error})") from None
        complete = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(complete.splitlines(), start=1):
            self._read(number, line)
        if (recorded := max((release.round for release in self.releases), default=0)) < evidence:
            reason = f"ends with round {recorded}" if self.path.exists() else "is missing"
            raise self._refusal(f"{reason}, but the run has reached round {evidence}")
        if len(complete) < len(content):
            os.truncate(self.path, len(complete))
            self.append(Release(recorded, CUT_SHORT, 0.0, 0.0))

    def append(self, release: Release) -> None:
        """Write one release. It is on the disk when this returns.

        Raises:
            CheckpointError: The release cannot be written.
        """
        entry = asdict(release)
        chained = self._chained(entry)
        append_line(self.path, f"{json.dumps({**entry, 'digest': chained})}\n".encode())
        self.releases.append(release)
        self._digest = chained

    def require_methods(self, methods: Collection[str]) -> None:
        """Raise `CheckpointError` for releases of other methods: their cost would be lost."""
        allowed = {*methods, CUT_SHORT, STATISTICS}
        if unknown := sorted({release.method for release in self.releases} - allowed):
            raise self._refusal(f"counts releases of {unknown[0]!r}, but this run does not use it")

    def counts(self, method: str, clients: int) -> Tensor:
        """Return the number of releases that each client has paid for.

        Args:
            method: Method of the releases.
            clients: Number of clients.

        Returns:
            `[clients]` int64. A release without names costs all clients.
        """
        counts = torch.zeros(clients, dtype=torch.int64)
        for release in self.releases:
            if release.method in (method, CUT_SHORT):
                counts[slice(None) if release.clients is None else list(release.clients)] += 1
        return counts

    def statistics(self) -> float:
        """Return the sum of 1 / noise^2 over the releases of statistics."""
        return sum(
            (release.noise**-2 for release in self.releases if release.method == STATISTICS), 0.0
        )

    def _chained(self, entry: dict[str, Any]) -> str:
        begins = entry["method"] != STATISTICS and all(
            release.method == STATISTICS for release in self.releases
        )
        return digest((self._start if begins else "") + self._digest + json.dumps(entry))

    def _read(self, number: int, line: bytes) -> None:
        try:
            entry: dict[str, Any] = json.loads(line)
            written = entry.pop("digest")
            chained = self._chained(entry)
            clients = entry["clients"]
            release = Release(**{**entry, "clients": None if clients is None else tuple(clients)})
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            written = ""
            chained = self._digest
            release = None
        if release is None or written != chained:
            raise self._refusal(f"is damaged in line {number}, or belongs to another run")
        self.releases.append(release)
        self._digest = chained

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {reason}: the spent privacy is unknown; use another folder"
        )
