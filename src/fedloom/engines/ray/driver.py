"""The Ray engine: Ray actors train clients, on one machine or several.

Models are sent through Ray's object store.
"""

import logging
import math
import os
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedloom.common.errors import FedloomError, InvalidValue, first_line
from fedloom.common.fields import NonNegative, checked
from fedloom.engines.base import engines
from fedloom.engines.client_work import Setup, WorkDone, slim
from fedloom.engines.dispatch import (
    MOST_WORKERS,
    WorkerDied,
    WorkerEngine,
    WorkerHandle,
    end_all,
    grouped,
)
from fedloom.engines.pickling import Packed, dump, load
from fedloom.engines.ray.session import DIED, LOCAL, Session, has_room, join, leave, load_ray
from fedloom.engines.stacked import unstackable_method
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Job
from fedloom.state.store import BUDGET
from fedloom.task import Task

GROUPS = 2
"""Groups of clients per actor that trains row by row.

With two, other actors can take the second group of a slow actor.
"""

MOST_ACTORS = 10_000
"""Upper limit of actors on a cluster."""

GROWTH_SECONDS = 180.0
"""Longest wait for a cluster to add a node for an actor. Local clusters never add nodes."""

NOTICE_SECONDS = 60.0
"""Seconds between two warnings that no actor has started yet."""

POLL_SECONDS = 1.0
"""Seconds between two checks of the cluster, while no actor has answered."""

_logger = logging.getLogger("fedloom")


@engines.register("ray")
class RayEngine(WorkerEngine):
    """Trains clients in Ray actors, on one machine or several.

    Each node stores one copy of the task's data. In each round, tensors for several clients are put
    into the object store once. Tensors for one client are sent with its group of clients, and each
    group has one answer. The clients' memory stays in this process and is sent with their work.

    Args:
        task: Data, model and local training, on the CPU. Actors with GPUs move it to the GPU.
        workers: Number of actors. By default the capacity of the cluster.
        cpus: Number of cores and threads per actor.
        gpus: Number of GPUs per actor. With a fraction, actors share a GPU.
        address: `local` starts a cluster on this machine and ends it later. `auto` connects to the
            cluster of this machine. `host:port` or `ray://host:port` connects to another cluster.
            All nodes need the same versions of Python, Ray and fedloom.
        inside: Engine in an actor: `rows`, or `stacked` for lock step.
        memory_budget: Bytes of client memory in this process.
        object_store: Bytes for objects on a local cluster, by default 1 GiB plus twice the data.
            Further objects are stored in files.

    Raises:
        InvalidValue: If a number is out of range, the task is not on the CPU, or a part of the task
            cannot be pickled.
        MissingExtra: If Ray is not installed.
        FedloomError: If there is no cluster, or it is too small for an actor.
    """

    name = "ray"
    kind = "Ray actor"

    def __init__(
        self,
        task: Task,
        *,
        workers: Annotated[int, Field(ge=1, le=MOST_ACTORS)] | None = None,
        cpus: Annotated[float, Field(ge=0.0001, le=MOST_WORKERS)] = 1,
        gpus: NonNegative = 0,
        address: str = LOCAL,
        inside: Literal["rows", "stacked"] = "rows",
        memory_budget: int = BUDGET,
        object_store: Annotated[int, Field(ge=100 << 20)] | None = None,
    ) -> None:
        amounts = {"workers": workers, "cpus": cpus, "gpus": gpus, "object_store": object_store}
        checked(RayEngine, {**amounts, "inside": inside})
        if not (gpus == 0 or 0.0001 <= gpus <= 1 or gpus in range(2, MOST_WORKERS + 1)):
            raise InvalidValue(
                f"gpus must be 0, a share from 0.0001 to 1 or a whole number, not {gpus:g}"
            )
        if address == LOCAL and workers and workers > MOST_WORKERS:
            raise InvalidValue(
                f"workers must be at most {MOST_WORKERS} on this machine, not {workers}"
            )
        super().__init__(workers or 1, inside, memory_budget)
        self.cpus = cpus
        self.gpus = gpus
        self.workers_fold = gpus == 0  # sums on a GPU round differently
        self._ray = load_ray()
        count = workers or self._local_capacity()  # size of a cluster that is started here
        data = sum(tensor.nbytes for tensor in (task.train.inputs, task.train.labels))
        store = (1 << 30) + 2 * data if object_store is None else object_store
        self.session = join(address, math.ceil(count * cpus), math.ceil(count * gpus), store)
        self._end = weakref.finalize(self, _close, self._handles, self.session)
        try:
            self.workers = workers or self._capacity()
            self._set_task(task)
            self._start_missing()
        except BaseException:
            self._end()
            raise

    def _local_capacity(self) -> int:
        """Return the number of actors that fit on this machine, by PyTorch's threads and GPUs."""
        if self.gpus:
            return max(1, int(torch.cuda.device_count() / self.gpus))
        return max(1, int(torch.get_num_threads() / self.cpus))

    def _capacity(self) -> int:
        """Return the number of actors that fit on the cluster."""
        if self.session.local:
            return self._local_capacity()
        resources = self._ray.cluster_resources()
        limits = [resources.get("CPU", 0) / self.cpus]
        if self.gpus:
            limits.append(resources.get("GPU", 0) / self.gpus)
        return max(1, int(min(limits)))

    def _setup_for(self, task: Task) -> Setup:
        if self.gpus:  # shortcuts of a GPU must be proven on the node of the actor
            return Setup(slim(task), self.inside, None)
        return self._proven_setup(task)

    def _pack(self, message: object, common: Mapping[int, int]) -> Packed:
        return dump(message, common)

    def _publish(self, packed: Packed) -> Any:
        return self._ray.put(packed)

    def _groups(self, pipeline: Pipeline, jobs: Sequence[Job]) -> list[list[Job]]:
        count = self.workers * (
            GROUPS if self.inside == "rows" or unstackable_method(pipeline.components()) else 1
        )
        return grouped(jobs, self._sizes(jobs), count, len(jobs))

    # --- the actors ---

    def _start(self) -> WorkerHandle:
        """Start an actor.

        Ray must not restart it: a restarting actor refuses calls, and a new one can use any node.
        """
        from fedloom.engines.ray.actor import TrainingActor

        # No other program uses a local cluster, so its actors need not reserve cores.
        cores = 0 if self.session.local else self.cpus
        kind = self._ray.remote(TrainingActor).options(
            num_cpus=cores, num_gpus=self.gpus, max_restarts=0
        )
        paths = [path or os.getcwd() for path in sys.path]
        return ActorHandle(self._ray, kind.remote(paths, max(1, int(self.cpus)), self.gpus > 0))

    def _wait(self, handles: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        """Wait for an answer, without a time limit while actors start.

        Raises `FedloomError` if no node is large enough for an actor, or the local node has died.
        """
        calls = {handle.call: handle for handle in handles if isinstance(handle, ActorHandle)}
        start = last_notice = time.monotonic()
        while True:
            done, _ = self._ray.wait(list(calls), num_returns=1, timeout=POLL_SECONDS)
            if done:
                return [calls[done[0]]]
            if self.session.died:
                raise FedloomError(DIED)
            now = time.monotonic()
            if any(handle.ready for handle in self._handles):
                continue
            cores = 0 if self.session.local else self.cpus
            if not has_room(self._ray, cores, self.gpus) and (
                self.session.local or now - start > GROWTH_SECONDS
            ):
                raise FedloomError(f"engine 'ray': no Ray actor can start: {self._shortage()}")
            if now - last_notice > NOTICE_SECONDS:
                reason = "its process is starting" if self.session.local else self._shortage()
                _logger.warning(
                    "no Ray actor has started in %.0f seconds, still waiting: %s",
                    now - start,
                    reason,
                )
                last_notice = now

    def _shortage(self) -> str:
        """Return a text with the resources of an actor and of the cluster."""
        needs = f"{self.cpus:g} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")
        free = self._ray.available_resources()
        total = self._ray.cluster_resources()
        return (
            f"each needs {needs} on one node; the cluster has {_amounts(free)} free of "
            f"{_amounts(total)}"
        )

    @property
    def processes(self) -> list[int]:
        """Process ids of the actors on their machines. Waits until the actors have started."""
        actors = [handle.actor for handle in self._handles if isinstance(handle, ActorHandle)]
        ids: list[int] = self._ray.get([actor.process.remote() for actor in actors])
        return ids

    def close(self) -> None:
        self._end()
        self.store.close()


class ActorHandle(WorkerHandle):
    """A Ray actor. Its first call returns when it has started."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__()
        self.ray = ray
        self.actor = actor
        self.call = actor.process.remote()

    def send(self, setup: Any, assignment: Any, work: Packed) -> None:
        self.call = self.actor.take.remote(setup, assignment, work)

    def receive(self) -> WorkDone | Exception:
        try:
            result = self.ray.get(self.call)
        except self.ray.exceptions.RayError as error:
            raise WorkerDied(reason_of_death(error)) from None
        if not self.ready:
            return WorkDone((), ())
        answers: WorkDone | Exception = load(*result)
        return answers

    def end(self) -> None:
        if self.ray.is_initialized():
            try:
                self.ray.kill(self.actor)
            except Exception:  # the actor or the connection is dead: nothing remains to stop
                return


def reason_of_death(error: BaseException) -> str:
    """Return the line of Ray's error with the reason for the end of an actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("creation task" in line for line in lines):
        return lines[-1]
    reasons = [line for line in lines if line.startswith("The actor is dead because")]
    if any("memory pressure" in line or "low on memory" in line for line in lines):
        return "Ray ended it, because its node ran out of memory"
    return reasons[0].split(". ")[0].rstrip(".") if reasons else first_line(error)


def _amounts(resources: Mapping[str, float]) -> str:
    """Return resources as text: `2 CPU, 0 GPU`."""
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


def _close(handles: list[WorkerHandle], session: Session) -> None:
    """Stop all actors and leave the cluster."""
    end_all(handles)
    leave(session)
