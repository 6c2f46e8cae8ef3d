"""Observers of rounds, such as recorders."""

from collections.abc import Sequence
from typing import Any, Protocol

from fedloom.algorithm.records import Replies
from fedloom.common.round import Round
from fedloom.rounds.checkpoint import RoundLog
from fedloom.rounds.engine import Job


class Observer(Protocol):
    """Records data of each round, without influence on the results.

    The federation calls `begin` when it is set up, before it resumes. It calls `observe` before the
    method receives the replies, so the round can still fail, and `commit` after a successful round.
    When a run resumes, later lines are removed from `log`. Checkpoints contain the digest of `log`.
    An observer that stores nothing has no log.
    """

    @property
    def log(self) -> RoundLog | None: ...
    def begin(self, federation: Any) -> None: ...
    def observe(self, round: Round, jobs: Sequence[Job], replies: Replies) -> None: ...
    def commit(self, number: int) -> None: ...
