"""The Ray engine: actors on one machine or many train the clients, and models travel through Ray's object store."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Algorithm
from fedloom.config.fields import Count, NonNegative, Positive, checked
from fedloom.engines.base import Choice, ClientTask, Fault, KeepsClientMemory, Reply, engines, expectations
from fedloom.engines.processes.worker import Broken, Failed, Setup, slim
from fedloom.engines.ray.crew import Death, Hand, amounts, dismiss, ending, kill
from fedloom.engines.ray.session import LOCAL, Session, join, load_ray
from fedloom.errors import FedloomError, InvalidValue
from fedloom.flat.allocator import keep_pages
from fedloom.round import Round
from fedloom.rounds.scoring import Tally
from fedloom.state.store import BUDGET, ClientStore
from fedloom.task import Task

ATTEMPTS = 3
"""A client whose actor dies so often fails."""

SHARES = 2
"""Shares of a round for each actor that trains row by row: a slow actor leaves the last ones to the others."""

START_SECONDS = 180.0
"""For so long a round waits for the first actor. Importing PyTorch takes seconds; a cluster that grows takes minutes."""

Kind = Literal["train", "evaluate"]


@engines.register("ray")
class RayEngine(KeepsClientMemory):
    """Trains clients in Ray actors, `workers` of them with `cpus` cores (as many threads) and `gpus` GPUs each.

    `address` is `local` (a cluster of this machine, started and taken down here), `auto` (the one this machine belongs to),
    `host:port` or `ray://host:port`; nodes need the same Python, Ray and fedloom. Without `workers` there are as many actors
    as that has room for. In an actor, clients train on the engine `inside`: `rows`, or `stacked` in lock step.

    The task's data lie once on every node, and actors read them there. Each round, rows that several clients are sent are put
    into the object store once; the rows of one client travel with the share of clients it belongs to, and one answer comes
    back for each share. What clients remember stays here, travels with them, and changes when the share's answer is in. So an
    answer depends on nothing but what was sent: when an actor or its node dies another takes its place, and the clients of its
    share train again, one by one, with the same result. A client whose actor dies three times fails, and says so.

    `memory_budget`: bytes of client memory kept here; the clients not used for longest spill to files beyond it.
    `object_store`: bytes for objects on a local cluster (by default 1 GiB and twice the data); more go to files.

    Raises `InvalidValue` for numbers out of range, a task that is not on the CPU (with GPUs, actors move it there) or something
    that cannot be pickled; `MissingExtra` without Ray; `FedloomError` where there is no cluster or no room on it.
    """

    chosen: Choice | None = None  # how it came to be this engine, where `make_engine` made it

    def __init__(
        self,
        task: Task,
        *,
        workers: Count | None = None,
        cpus: Positive = 1,
        gpus: NonNegative = 0,
        address: str = LOCAL,
        inside: Literal["rows", "stacked"] = "rows",
        memory_budget: int = BUDGET,
        object_store: Annotated[int, Field(ge=100 << 20)] | None = None,
    ) -> None:
        checked(
            RayEngine, {"workers": workers, "cpus": cpus, "gpus": gpus, "inside": inside, "object_store": object_store}
        )
        self.store = ClientStore(budget=memory_budget)
        self.cpus, self.gpus, self.inside = cpus, gpus, inside
        self._ray = load_ray()
        self.session = self._join(task, address, workers, object_store)
        self._crew: list[Hand] = []
        self._end = weakref.finalize(self, dismiss, self._crew, self.session)
        self.workers = workers or self._room()
        self._failed_starts = 0
        self._numbers = itertools.count()
        try:
            self._setup = self._pack(Setup.of_this_process())
            self._share_out(task)
            self._hire()
        except BaseException:
            self._end()
            raise

    def _join(self, task: Task, address: str, workers: int | None, object_store: int | None) -> Session:
        """A local cluster has what its actors need; elsewhere Ray knows what there is."""
        count = workers or self._here()
        data = sum(tensor.nbytes for tensor in (task.train.inputs, task.train.labels))
        store = (1 << 30) + 2 * data if object_store is None else object_store
        return join(address, math.ceil(count * self.cpus), math.ceil(count * self.gpus), store)

    def _here(self) -> int:
        """Actors that this machine has room for, by the cores and GPUs that PyTorch may use."""
        if self.gpus:
            return max(1, int(torch.cuda.device_count() / self.gpus))
        return max(1, int(torch.get_num_threads() / self.cpus))

    def _room(self) -> int:
        """Actors that the cluster has room for."""
        if self.session.local:
            return self._here()
        found = self._ray.cluster_resources()
        limits = [found.get("CPU", 0) / self.cpus] + ([found.get("GPU", 0) / self.gpus] if self.gpus else [])
        return max(1, int(min(limits)))

    def begin(self, task: Task, directory: Path | None) -> None:
        if task is not self.task:
            self._share_out(task)
        self.store.begin(directory)
        keep_pages()

    def _share_out(self, task: Task) -> None:
        if task.initial.is_cuda:
            raise InvalidValue(
                f"engine 'ray' takes a task on the CPU, not on {task.initial.device}: its actors move it"
            )
        self.task = task
        self._task = self._ray.put(self._pack(slim(task)))

    # --- the work of a round ---

    def train(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Reply | Fault]:
        expected = expectations(algorithm, round, self.task.layout)
        matrices = self._matrices(expected, round, client_tasks)
        for taken, answer in self._answers("train", algorithm, round, expected, client_tasks):
            outcomes = [answer] * len(taken) if isinstance(answer, Failed) else answer
            for client_task, outcome in zip(taken, outcomes, strict=True):
                if isinstance(outcome, Failed):
                    yield Fault(client_task, outcome.reason, outcome.error)
                    continue
                if outcome.written:
                    self.store.write(client_task.client, {name: rows.clone() for name, rows in outcome.written.items()})
                yield Reply(
                    client_task, _placed(outcome.tensors, matrices, client_task.slot), outcome.metrics, matrices
                )

    def evaluate(self, algorithm: Algorithm, round: Round, client_tasks: Sequence[ClientTask]) -> Iterator[Tally]:
        if self.task.local_test is None:
            raise InvalidValue("the clients have no test data of their own: give the task local_test, such as 0.25")
        for _, answer in self._answers("evaluate", algorithm, round, {}, client_tasks):
            if isinstance(answer, Failed):
                raise answer.error or FedloomError(answer.reason)
            yield from answer

    def _matrices(
        self, expected: Mapping[str, tuple[int, ...]], round: Round, client_tasks: Sequence[ClientTask]
    ) -> dict[str, Tensor]:
        """One row for each slot, `[slots, ...]`, for every tensor expected, in the type of the model."""
        slots = max(
            [
                len(round.selected),
                *(client_task.slot + 1 for client_task in client_tasks if client_task.slot is not None),
            ]
        )
        return {name: torch.empty(slots, *shape, dtype=self.task.layout.dtype) for name, shape in expected.items()}

    def _answers(
        self,
        kind: Kind,
        algorithm: Algorithm,
        round: Round,
        expected: dict[str, tuple[int, ...]],
        client_tasks: Sequence[ClientTask],
    ) -> Iterator[tuple[tuple[ClientTask, ...], Any]]:
        """Every share's answer as it comes; `Broken` is raised. Leaving early, nobody listens to those that are still to come."""
        from fedloom.engines.ray.actor import Briefing
        from fedloom.engines.ray.parcel import unpack

        self._forget_shares()
        common = _common(client_tasks)
        places = {id(rows): place for place, rows in enumerate(common)}
        number = next(self._numbers)
        briefing = self._ray.put(self._pack(Briefing(algorithm, round, expected, tuple(common))))
        waiting = deque(self._shares(client_tasks))
        deaths: Counter[int] = Counter()

        def give(hand: Hand) -> None:
            hand.share = waiting.popleft()
            if hand.task is not self._task:
                hand.handle.begin.remote(self._task)
                hand.task = self._task
            hand.call = hand.handle.work.remote(number, briefing, self._pack(self._parcel(kind, hand.share, places)))

        try:
            while waiting or any(hand.share for hand in self._crew):
                if waiting:
                    self._hire()
                for hand in [hand for hand in self._crew if hand.ready and hand.call is None]:
                    if waiting:
                        give(hand)
                hand = self._next()
                share = hand.share
                result = self._result(hand)
                if share is None:
                    continue
                if isinstance(result, Death):
                    deaths.update(id(client_task) for client_task in share)
                    if len(share) > 1 or deaths[id(share[0])] < ATTEMPTS:
                        # Each by itself, so that nobody pays for what another does to their actor.
                        waiting.extendleft((client_task,) for client_task in reversed(share))
                        continue
                    reason = f"its Ray actor died {ATTEMPTS} times ({result.reason})"
                    yield share, Failed(reason, FedloomError(f"client {share[0].client}: {reason}"))
                    continue
                if waiting:
                    give(hand)  # before the answer is dealt with, so that the actor does not wait for that
                answer = unpack(result)
                if isinstance(answer, Broken):
                    raise answer.error
                yield share, answer
        finally:
            self._forget_shares()

    def _parcel(self, kind: Kind, share: Sequence[ClientTask], places: Mapping[int, int]) -> Any:
        from fedloom.engines.ray.actor import Piece, Share

        return Share(
            kind,
            tuple(
                Piece(
                    client_task.client,
                    client_task.slot,
                    {name: rows for name, rows in client_task.inbox.items() if id(rows) not in places},
                    {name: places[id(rows)] for name, rows in client_task.inbox.items() if id(rows) in places},
                    self.store.read(client_task.client),
                )
                for client_task in share
            ),
        )

    def _shares(self, client_tasks: Sequence[ClientTask]) -> list[tuple[ClientTask, ...]]:
        """The orders in shares of about equal work, the largest first."""
        clients = torch.tensor([client_task.client for client_task in client_tasks], dtype=torch.int64)
        sizes = self.task.sizes(clients).tolist()
        count = min(len(client_tasks), self.workers * (SHARES if self.inside == "rows" else 1))
        return [tuple(client_tasks[k] for k in part) for part in divide(sizes, count)]

    # --- the actors ---

    def _hire(self) -> None:
        """Ray could restart an actor itself, but would refuse its calls meanwhile; a new one serves at once, on any node."""
        from fedloom.engines.ray.actor import TrainingActor

        while len(self._crew) < self.workers:
            # A local cluster is ours alone: its actors wait for no one to give cores back.
            cores = 0 if self.session.local else self.cpus
            kind = self._ray.remote(TrainingActor).options(num_cpus=cores, num_gpus=self.gpus, max_restarts=0)
            paths = [path or os.getcwd() for path in sys.path]
            handle = kind.remote(paths, self._setup, max(1, int(self.cpus)), self.inside, self.gpus > 0)
            self._crew.append(Hand(handle, handle.begin.remote(self._task), self._task))

    def _next(self) -> Hand:
        """The actor that has something to say. Raises `FedloomError` when none is there to work and none comes."""
        speaking = {hand.call: hand for hand in self._crew if hand.call is not None}
        deadline = time.monotonic() + START_SECONDS
        while True:
            done, _ = self._ray.wait(list(speaking), num_returns=1, timeout=1.0)
            if done:
                return speaking[done[0]]
            if time.monotonic() > deadline and not any(hand.ready for hand in self._crew):
                needs = f"{self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")
                raise FedloomError(
                    f"no Ray actor started in {START_SECONDS:g} seconds (each needs {needs}): the cluster has "
                    f"{amounts(self._ray.available_resources())} free of {amounts(self._ray.cluster_resources())}"
                )

    def _result(self, hand: Hand) -> Any:
        """What an actor's call came to, or its `Death`. Raises `FedloomError` when it cannot begin."""
        from fedloom.engines.ray.parcel import unpack

        try:
            result = self._ray.get(hand.call)
        except self._ray.exceptions.RayError as error:
            self._crew.remove(hand)
            kill(self._ray, hand)
            if not hand.ready:
                self._failed_starts += 1
                if self._failed_starts >= ATTEMPTS:
                    self._failed_starts = 0
                    raise FedloomError(f"Ray actors cannot start: {ending(error)}") from None
            return Death(ending(error))
        if not hand.ready:
            begun = unpack(result)
            if isinstance(begun, Broken):
                raise begun.error
        hand.ready, hand.call, hand.share = True, None, None
        self._failed_starts = 0
        return result

    def _forget_shares(self) -> None:
        """Busy actors go on to the end of their shares, whose answers change nothing, and are then free again."""
        for hand in self._crew:
            hand.share = None

    def _pack(self, message: object) -> Any:
        """Raises `InvalidValue` for what cannot travel to another process."""
        from fedloom.engines.ray.parcel import pack

        try:
            return pack(message)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise InvalidValue(f"engine 'ray' cannot send this to its actors: {text}") from error

    @property
    def processes(self) -> list[int]:
        """The numbers of the actors' processes, on their machines; waits until they are there."""
        found: list[int] = self._ray.get([hand.handle.process.remote() for hand in self._crew])
        return found

    def close(self) -> None:
        self._end()
        self.store.close()


def divide(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The places 0 to n - 1 in `count` parts of about equal sums of `sizes`, the part with the largest first.

    Longest first: each goes to the part that has least so far (and of those, to the one with fewest).
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for place in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        least = min(range(count), key=lambda k: (sums[k], len(parts[k]), k))
        parts[least].append(place)
        sums[least] += sizes[place]
    return [parts[k] for k in sorted(range(count), key=lambda k: (-sums[k], k))]


def _common(client_tasks: Sequence[ClientTask]) -> list[Tensor]:
    """What several clients are sent, each once."""
    counts = Counter(id(rows) for client_task in client_tasks for rows in client_task.inbox.values())
    found = {
        id(rows): rows for client_task in client_tasks for rows in client_task.inbox.values() if counts[id(rows)] > 1
    }
    return list(found.values())


def _placed(tensors: Mapping[str, Tensor], matrices: Mapping[str, Tensor], slot: int | None) -> dict[str, Tensor]:
    """The tensors copied out of the object store, which lends them to be read: into the row of the slot where they fit."""
    placed = {}
    for name, tensor in tensors.items():
        matrix = matrices.get(name)
        if matrix is not None and slot is not None and matrix.dtype == tensor.dtype:
            placed[name] = matrix[slot].copy_(tensor)
        else:
            placed[name] = tensor.clone()
    return placed
