"""An engine that returns the replies in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Answer, Fault, Job


class Shuffled(RowsEngine):
    """Trains the clients in another order and uses a new replica for every second client."""

    def train(
        self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]
    ) -> Iterator[Answer | Fault]:
        replica = RowsEngine(self.task)
        replica.store = self.store
        order = torch.randperm(
            len(jobs), generator=torch.Generator().manual_seed(round.number)
        ).tolist()
        for k in order:
            engine = super() if k % 2 else replica
            yield from engine.train(pipeline, round, [jobs[k]])
