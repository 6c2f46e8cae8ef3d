"""Private federations that are interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.rounds.engine import RemoteClients
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from kill_support import Killed
from private_support import task


class Sites(RowsEngine, RemoteClients):
    """Clients as sites. If `fails` is True, one site fails in the middle of a round."""

    largest_share = 1.0
    fails = False

    def train(self, *arguments: Any) -> Any:
        for result in super().train(*arguments):
            yield result
            if self.fails:
                raise Killed


def sites(expression: str, folder: Path, rounds: int = 4) -> Federation:
    schedule = Schedule(rounds=rounds, participation=1.0, evaluate_every=9, seed=2)
    return Federation(build(expression), task(), Sites(task()), schedule, folder, "this run")


def interrupted(expression: str, folder: Path) -> None:
    """Run two rounds and kill the third in the middle."""
    folder.mkdir()
    federation = sites(expression, folder)
    for _ in range(2):
        federation.step()
        federation.save()
    federation.engine.fails = True  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        federation.step()
