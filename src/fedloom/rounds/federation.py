"""The round: select, send, train, reply, receive, evaluate, record; with checkpoints, so that nothing is lost."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedloom.algorithm import NOTHING, Algorithm, Exchange, Message, Plan, Replies, Selection, name_of, source_of
from fedloom.algorithms.private import Accounted
from fedloom.errors import CheckpointError, Diverged, InvalidValue, RefusedReply, code_location, in_brackets
from fedloom.flat.device import moved_back
from fedloom.flat.population import capped
from fedloom.round import Round
from fedloom.rounds.checkpoint import Checkpoint, Checkpoints, RoundLog
from fedloom.rounds.engine import (
    INTEGERS,
    ClientTask,
    Engine,
    Fault,
    FoldingEngine,
    RemoteClients,
    Reply,
    expectations,
    inbox_of,
)
from fedloom.rounds.evaluation import Evaluation, Record, newcomers_last, untrained
from fedloom.rounds.pool_watch import PoolWatch
from fedloom.rounds.replies import RoundReplies, weights_of
from fedloom.rounds.schedule import Schedule as Schedule
from fedloom.rounds.termination import sigterm_interrupts, uninterrupted
from fedloom.state.files import remove_unfinished
from fedloom.state.pool_files import PoolFiles
from fedloom.state.released import RELEASED, Release, ReleaseLedger
from fedloom.task import Task

DIVERGED = 1000
"""A global model whose loss is so many times that of guessing has diverged: training does not bring it back."""


class Observer(Protocol):
    """Records something of the rounds of a federation, and has no influence on them.

    `begin` is called when the federation is set up, before it resumes; `observe` before the method receives what came back, in a
    round that may still fail; `commit` when it has succeeded. `log` is cut where a run resumes, and checkpoints know it.
    """

    @property
    def log(self) -> RoundLog: ...
    def begin(self, federation: "Federation") -> None: ...
    def observe(self, round: Round, client_tasks: Sequence[ClientTask], replies: Replies) -> None: ...
    def commit(self, number: int) -> None: ...


class Federation:
    """One method on one task in one engine, round after round.

    With a `directory`, each round appends its figures to `metrics.jsonl`, those of single clients to `clients.jsonl`, and its
    times and new notices to `timings.jsonl`; checkpoints are kept there, and client memory that does not fit into them under
    `clients`, and pools larger than the schedule's `pool_budget` under `pool`; a run with such a pool has a checkpoint of every
    round. A federation made again with the same arguments continues from the newest checkpoint of the same `identity`.

    Figures name clients by the task's numbers. Where some never train (`Schedule.new_clients`), `self.task` has these last,
    and methods and engine use the numbers of that order.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        engine: Engine,
        schedule: Schedule,
        directory: Path | None = None,
        identity: str = "",
        observers: Sequence[Observer] = (),
    ) -> None:
        self.observers = observers
        self.algorithm, self.engine, self.schedule = algorithm, engine, schedule
        newcomers = schedule.newcomers(task.clients)
        self.task, self.numbers = newcomers_last(task, newcomers, schedule.seed)
        trainers = task.clients - newcomers
        self.evaluation = Evaluation(self.task, engine, schedule, trainers, self.numbers)
        self.integers = task.initial_integers.clone()
        self.finished = self._saved = 0  # rounds so far, and at the last checkpoint
        self._pool_watch = PoolWatch(task.test.labels, schedule.rounds)
        self._noted: set[str] = set()  # the notices that are in `timings` by now
        self._midway = False  # a round has begun and not ended, so that the state is that of no round
        self._now = 0.0  # of the simulated clock
        self._awaited = schedule.participants(trainers)  # replies of a round, at most
        participants = schedule.clock.selected(self._awaited, trainers)
        if schedule.clock.runs and isinstance(engine, RemoteClients):
            raise InvalidValue("clock: the time of real sites is that of the real clock: leave the table [clock] out")
        task.training.same_rates(schedule.rounds, schedule.rounds)  # raises where there is none
        rate = task.training.rate(1, schedule.rounds)
        poisson = schedule.participation_mode == "poisson"
        _require_fit(algorithm, poisson, participants > self._awaited)
        self._first = Round(1, schedule.rounds, schedule.seed, trainers, participants, rate, rate, poisson=poisson)
        self._pools = PoolFiles(None if directory is None else directory / "pool", schedule.pool_budget)
        plan = Plan(
            task.layout, task.initial, trainers, participants, schedule.rounds, schedule.seed, task.dataset.classes,
            self.task.sizes, task.model, isinstance(engine, RemoteClients), poisson, self._pools,
            task.training, min(self._awaited, participants),
        )  # fmt: skip
        algorithm.setup(plan)
        _checked_model(algorithm, "setup", task.initial)
        self._untrained = untrained(algorithm)
        engine.begin(self.task, None if directory is None else directory / "clients")
        self.checkpoints = None if directory is None else Checkpoints(directory, identity)
        self._ledger: ReleaseLedger | None = None
        if directory is not None and isinstance(engine, RemoteClients) and self._accounted():
            self._ledger = ReleaseLedger(directory / RELEASED, identity)
        logs = {"metrics.jsonl": (), "timings.jsonl": ("ended", "seconds", "train_seconds"), "clients.jsonl": ()}
        self._logs = [RoundLog(None if directory is None else directory / name, logs[name]) for name in logs]
        for observer in observers:
            observer.begin(self)
        self._resume()

    @property
    def history(self) -> list[Record]:
        """The figures of each round, read anew where there is a directory."""
        return self._logs[0].read()

    @property
    def timings(self) -> list[Record]:
        """The times of each round."""
        return self._logs[1].read()

    @property
    def client_history(self) -> list[Record]:
        """The figures client by client, of the rounds in which they were taken."""
        return self._logs[2].read()

    @property
    def notices(self) -> list[str]:
        """Notices, a line each: what was wrong with the checkpoints at the start, how clients train where that is not as usual,
        whether the models of a pool have come apart, and why the run ends early."""
        damaged = [] if self.checkpoints is None else self.checkpoints.notices
        ends = self.evaluation.patience.notices
        if self.finished and self.algorithm.spent:
            ends = [f"the privacy budget is spent: the run ends after round {self.finished}", *ends]
        return [*self.task.notices, *self._untrained, *damaged, *self.engine.notices, *self._pool_watch.notices, *ends]

    def run(self, on_round: Callable[[Record, Record], None] | None = None) -> None:
        """Run the remaining rounds; `on_round` is called after each with its figures and its times.

        An interruption (Ctrl-C) or an error leaves a checkpoint of the last finished round behind. Where the interrupted round
        has changed too much client memory to be undone, the checkpoint before stays the last, and `run` raises `CheckpointError`.
        """
        if self._midway:
            raise CheckpointError("a round was interrupted: make the federation again to go on from a checkpoint")
        if self.finished == 0 and self.algorithm.spent:
            if self._ledger is not None and self._ledger.releases:
                raise CheckpointError(
                    f"{self._ledger.path}: lost rounds or statistics spent the budget: change folders"
                )
            raise InvalidValue(f"{self.algorithm}: one round costs more epsilon than target_epsilon: give more noise")
        with sigterm_interrupts():
            try:
                while self.finished < self.schedule.rounds:
                    if self.algorithm.spent or self.evaluation.patience.round:
                        break
                    record, timing = self.step()
                    if self.algorithm.releases_once or self._pools.holds(self.algorithm.full_state().values()):
                        self.save()
                    if on_round is not None:
                        on_round(record, timing)
                    if self.finished % self.schedule.checkpoint_every == 0 or self.finished == self.schedule.rounds:
                        self.save()
            finally:
                if self._saved < self.finished and not self._midway:
                    self.save()

    def step(self) -> tuple[Record, Record]:
        """Run a round: all of it or nothing. Raises `Diverged` when no client's model is finite, or the global one diverges."""
        self._midway = True
        state, integers = self.algorithm.full_state(), self.integers
        succeeded = False
        try:
            lines = self._round(self.task.training.round_at(self._first, self.finished + 1))
            with uninterrupted():
                succeeded = True
                self._record(*lines)
                self.engine.commit()
                self._midway = False
        except BaseException:
            if not succeeded:
                self.algorithm.restore(state)
                self._count_releases()
                self.integers = integers
                self._midway = not self.engine.rollback()
            raise
        return lines[:2]

    def _round(self, round: Round) -> tuple[Record, Record, Record | None]:
        """The figures of a new round, its times, and the figures client by client if they were taken."""
        began = time.perf_counter()
        clock = self.schedule.clock
        simulated = clock.runs
        round = replace(round, closes=math.inf if clock.deadline is None else self._now + clock.deadline)
        question, asked, asked_up = self._ask(round)
        selection = self.algorithm.select(round)
        round = replace(round, selected=selection.clients)
        exchange = self.algorithm.exchange(round, selection)
        message = dict(exchange.sent)
        _require_rows(self.algorithm, message, selection)
        expected = expectations(self.algorithm, round, self.task.layout)
        if INTEGERS in expected:
            message[INTEGERS] = self.integers.unsqueeze(0)
        client_tasks, absent = self._client_tasks(exchange, message)
        finish = self._finish_times(client_tasks, sum(spec.bytes for spec in expected.values())) if simulated else {}
        seconds = self._now
        if simulated and not self.algorithm.asynchronous:
            numbers = [self.numbers[selection.clients[slot]] for slot in finish]
            taken, seconds = round.on_time([*finish.values()], numbers, self._awaited, self._now)
            late = {slot: time - self._now for k, (slot, time) in enumerate(finish.items()) if k not in taken}
            absent += [Fault(t, f"late: after {late[t.slot]:.6g} s") for t in client_tasks if t.slot in late]
            client_tasks = [task for task in client_tasks if task.slot not in late]
        awaited = torch.zeros(len(selection.clients), dtype=torch.bool)
        awaited[[task.slot for task in client_tasks if task.slot is not None]] = True
        exchange = exchange.awaiting(awaited)
        self._note_releases(round, selection)
        under_way = self.engine.under_way if isinstance(self.engine, RemoteClients) else frozenset()
        answers = self._answers(exchange, client_tasks)
        trained = observed = time.perf_counter()
        replies = None if answers.fold else answers.together()
        if replies is not None:
            for observer in self.observers:
                observer.observe(round, client_tasks, replies)
            observed = time.perf_counter()
            replies.matrices.pop(INTEGERS, None)
        if answers.integers is not None and len(answers.integers):
            self.integers = self.algorithm.merge_integers(answers.integers, self.integers)
        if answers.arrived or self.algorithm.updates_without_replies:
            if replies is None:
                self.algorithm.update(round, replace(answers.aggregate or NOTHING, exchange=exchange))
            else:
                if simulated:
                    arrivals = [finish[slot] for slot in replies.slots.tolist()]
                    replies.finish = torch.tensor(arrivals, dtype=torch.float64)
                self.algorithm.receive(round, replies)
        del replies
        self.algorithm.finish(round, exchange)
        self._count_releases()
        model = _checked_model(self.algorithm, "update" if self.algorithm.folds else "receive", self.task.initial)
        received = time.perf_counter()
        faults = [*absent, *answers.faults]
        receivers = selection.receivers or len(selection.clients) + len(selection.idle)
        receivers -= sum(not fault.sent for fault in faults) + len(under_way)
        same = question.keys() == exchange.sent.keys()
        same = same and all(torch.equal(question[name], exchange.sent[name]) for name in question)
        asked_down = sum(map(_row_bytes, question.values())) * (asked - same * len(selection.clients))
        record: Record = {
            "round": round.number,
            "clients": [self.numbers[client] for client in selection.clients if client not in under_way],
            "bytes_down": sum(map(_row_bytes, message.values())) * receivers + asked_down,
            "bytes_up": answers.bytes + asked_up,
            "faults": [{"client": self.numbers[f.client_task.client], "reason": f.reason} for f in faults],
            **({"simulated_seconds": seconds} | self.algorithm.account()),
        }
        if not simulated:
            del record["simulated_seconds"]
        for name, values in answers.metrics.items():
            record.setdefault(name, float(values[~values.isnan()].mean()))
        figures, clients = self.evaluation.measure(self.algorithm, round, model, self.integers)
        self._require_converging(round, model, figures.get("loss"))
        for name, value in (record | figures).items():  # JSON cannot express an infinite or undefined figure
            record[name] = None if isinstance(value, float) and not math.isfinite(value) else value
        self._pool_watch.see(record)
        ended = time.perf_counter()
        timing: Record = {
            "round": round.number,
            "ended": time.time(),
            "seconds": ended - began,
            "train_seconds": trained - began,
            "server_seconds": received - observed,
            "evaluate_seconds": ended - received,
            **({"record_seconds": observed - trained} if self.observers else {}),
        }
        return record, timing, clients

    def _accounted(self) -> dict[str, Accounted]:
        """Return the methods whose rounds cost privacy, by their names in the ledger. They are active in every round."""
        methods = enumerate(self.algorithm.nested())
        return {f"{k}.{name_of(method)}": method for k, method in methods if isinstance(method, Accounted)}

    def _note_releases(self, round: Round, selection: Selection) -> None:
        """Write in the ledger what the round is about to release, before anything is sent."""
        if self._ledger is not None:
            for name, method in self._accounted().items():
                clients = method.counted(selection)
                self._ledger.append(Release(round.number, name, method.noise_multiplier(), method.bound(), clients))

    def _count_releases(self) -> None:
        """Let methods count all releases in the ledger, those of rounds that failed or are repeated among them."""
        if self._ledger is not None:
            for name, method in self._accounted().items():
                method.state["releases"] = self._ledger.counts(name, len(method.state["releases"]))
                method.earlier = self._ledger.statistics()

    def _require_converging(self, round: Round, model: Tensor, loss: float | None) -> None:
        """Raise `Diverged` when the global model is not finite, or its loss, where that was measured, is far beyond guessing."""
        if not bool(torch.isfinite(model).all()):
            raise _diverged(round, "the global model is not finite any more")
        guess = self.task.objective.guess(self.task.dataset.spec.outputs)
        if loss is not None and not loss < DIVERGED * guess:
            beyond = f", over {DIVERGED} times that of guessing" if math.isfinite(loss) else ""
            raise _diverged(round, f"the global model's loss is {loss:.3g}{beyond}")

    def _ask(self, round: Round) -> tuple[Message, int, int]:
        """Ask clients what the method wants to know. Return what they were sent, their number, and the bytes of their answers."""
        for method in self.algorithm.active(round.number):
            if (asked := method.question(round)) is not None:
                question, clients = asked
                message = question.deploy(round, clients)
                tasks = [ClientTask(client, slot, inbox_of(message, slot)) for slot, client in enumerate(clients)]
                answers = RoundReplies(tasks, len(tasks), len(tasks), self._weights, None)
                answers.collect(self.engine.train(question, replace(round, selected=clients), tasks))
                if answers.arrived:
                    method.hear(answers.together())
                return message, len(clients), answers.bytes
        return {}, 0, 0

    def _client_tasks(self, exchange: Exchange, message: Message) -> tuple[list[ClientTask], list[Fault]]:
        """The tasks of all clients that take part, and those of the selected ones that drop out."""
        round, selection, client_tasks, absent = exchange.round, exchange.selection, [], []
        for slot, client in enumerate(selection.clients):
            weight = None if selection.weights is None else selection.weights[slot]
            client_task = ClientTask(client, slot, inbox_of(message, slot), weight)
            chance = self.schedule.dropout and float(torch.rand((), generator=round.stream("dropout", client)))
            if chance < self.schedule.dropout:
                absent.append(Fault(client_task, "dropped out", sent=False))
            else:
                client_tasks.append(client_task)
        shared = inbox_of(message, len(selection.clients))
        return [*client_tasks, *(ClientTask(client, None, shared) for client in selection.idle)], absent

    def _finish_times(self, client_tasks: Sequence[ClientTask], upload: int) -> dict[int, float]:
        """Return by slot when the simulated clock has each reply, of `upload` bytes."""
        uploads = [(task, task.slot) for task in client_tasks if task.slot is not None]
        sizes = self.task.sizes(torch.tensor([task.client for task, _ in uploads], dtype=torch.int64)).tolist()
        arrivals = {}
        for (task, slot), size in zip(uploads, sizes, strict=True):
            device = self.schedule.clock.device(self.schedule.seed, self.numbers[task.client])
            down = sum(map(_row_bytes, task.inbox.values()))
            arrivals[slot] = device.finish(self._now, self.task.training.samples_seen(int(size)), down, upload)
        return arrivals

    def _answers(self, exchange: Exchange, client_tasks: Sequence[ClientTask]) -> RoundReplies:
        """Return the answers, folded as they come unless the method, an observer or limits on remote clients need all."""
        round, remote = exchange.round, isinstance(self.engine, RemoteClients)
        fold = self.algorithm.folds and not self.observers and not remote
        folding = partial(self.algorithm.fold, round) if fold else None
        slots, size = len(exchange.selection.clients), self.algorithm.slots_together
        answers = RoundReplies(client_tasks, slots, size, self._weights, folding, self._pools, exchange)
        if fold and isinstance(self.engine, FoldingEngine):
            answers.collect(self.engine.train(self.algorithm, round, client_tasks, fold=exchange))
        else:
            answers.collect(self.engine.train(self.algorithm, round, client_tasks))
        if not answers.arrived:
            _raise_unless_absent(self.algorithm, round, answers.faults)
        return answers

    def _weights(self, replies: Sequence[Reply]) -> Tensor:
        """Return the weights of replies: those of the selection, or else the samples of their clients."""
        weights = weights_of(self.task, replies)
        if not isinstance(self.engine, RemoteClients) or any(reply.client_task.weight is not None for reply in replies):
            return weights
        return capped(weights, self.engine.largest_share)

    def _record(self, record: Record, timing: Record, clients: Record | None) -> None:
        for observer in self.observers:
            observer.commit(record["round"])
        self.evaluation.patience.see(record["round"], record)
        self.finished, self._now = record["round"], record.get("simulated_seconds", 0.0)
        if notices := [text for text in self.notices if text not in self._noted]:
            timing["notices"] = notices
            self._noted.update(notices)
        for log, line in zip(self._logs, (record, timing, clients), strict=True):
            if line is not None:
                log.append(line)

    def personal_tasks(self) -> Iterator[tuple[int, Round, ClientTask]]:
        """Yield what each evaluated client is sent in order to personalise, with its number and the round to come."""
        evaluation, training = self.evaluation, self.task.training
        upcoming = training.round_at(self._first, self.finished + 1)
        clients = (*evaluation.clients, *evaluation.newcomers)
        for client_tasks in evaluation.deployed(self.algorithm, upcoming, clients, self.integers):
            yield from ((self.numbers[task.client], upcoming, task) for task in client_tasks)

    def save(self) -> None:
        """Write a checkpoint, after the figures and client memory that it refers to; then remove what only older ones needed."""
        if self.checkpoints is not None:
            logs = self._checked_logs()
            for log in logs:
                log.sync()
            state = {**self.algorithm.full_state(), INTEGERS: self.integers}
            pools = {name: file for name, tensor in state.items() if (file := self._pools.write(tensor)) is not None}
            server = {name: tensor for name, tensor in state.items() if name not in pools}
            digests = {log.name: log.digest for log in logs}
            self.checkpoints.save(Checkpoint(self.finished, server, self.engine.memory(), digests, pools))
            self._pools.keep(pools.values())
            self.engine.release_memory()
        self._saved = self.finished

    def _checked_logs(self) -> list[RoundLog]:
        """Return the logs of figures, which must be as a checkpoint knows them; times need not."""
        return [self._logs[0], self._logs[2], *(observer.log for observer in self.observers)]

    def _adopt(self, checkpoint: Checkpoint) -> None:
        for log in self._checked_logs():
            log.require(checkpoint.round, checkpoint.logs.get(log.name))
        checkpoint.server.update({name: self._pools.read(written) for name, written in checkpoint.pools.items()})
        self.engine.restore_memory(checkpoint.clients)

    def _resume(self) -> None:
        if self.checkpoints is None:
            return
        remove_unfinished(self.checkpoints.directory)
        if self._ledger is not None:
            shown = max([0, *(record["round"] for record in self.history), *self.checkpoints.rounds()])
            self._ledger.resume(shown)
        recorded = [log.complete(log.read()) for log in (self._logs[0], *(observer.log for observer in self.observers))]
        checkpoint = self.checkpoints.latest(min(recorded), self._adopt)
        finished = 0 if checkpoint is None else checkpoint.round
        history, timings, _ = [log.resume(finished) for log in self._logs]
        self.finished = self._saved = finished
        self._now = history[-1].get("simulated_seconds", 0.0) if history else 0.0
        self._noted.update(text for timing in timings for text in timing.get("notices", ()))
        for record in history:
            self._pool_watch.see(record)
            self.evaluation.patience.see(record["round"], record)
        for observer in self.observers:
            observer.log.resume(finished)
        if checkpoint is not None:
            self._pools.keep(checkpoint.pools.values())
            like = {**self.algorithm.full_state(), INTEGERS: self.integers}
            server = moved_back(checkpoint.server, like, self.task.initial.device)
            self.integers = server.pop(INTEGERS)
            self.algorithm.restore(server)
        self._count_releases()


def _row_bytes(rows: Tensor) -> int:
    """The size of one row of `[k, ...]`."""
    return math.prod(rows.shape[1:]) * rows.element_size()


def _diverged(round: Round, reason: str) -> Diverged:
    model = f"the model of round {round.number - 1} is kept" if round.number > 1 else "there is no model before that"
    rate = f"learning rate {round.learning_rate:g}"
    return Diverged(f"round {round.number}: training diverged ({rate}): {reason}; {model}")


def _require_fit(algorithm: Algorithm, poisson: bool, over_selected: bool) -> None:
    """Raise `InvalidValue` unless the method's rounds may have other clients each time, where the schedule's have."""
    if (poisson or over_selected) and (method := source_of(algorithm, "fixed_participants")) is not None:
        draws = "participation_mode = poisson draws another number of clients in each round"
        drops = "clock.over_selection drops the last replies of every round"
        needs = "needs as many clients each time, and the replies of all"
        needs = "says itself whose replies it takes" if method.asynchronous else needs
        raise InvalidValue(f"{draws if poisson else drops}, but {method} {needs}")
    if over_selected and algorithm.needs_every_reply:
        reason = f"one client less lets another in, which the epsilon of {algorithm} does not count"
        raise InvalidValue(f"clock.over_selection takes the first replies of a round: {reason}: leave it out")


def _raise_unless_absent(algorithm: Algorithm, round: Round, faults: list[Fault]) -> None:
    """Raise why a round has no reply at all, unless its clients were merely absent."""
    if faults and all(fault.diverged for fault in faults):
        raise _diverged(round, "no client's model is finite any more")
    for fault in faults:
        if isinstance(fault.error, RefusedReply):
            reason = f"{fault.client_task.client}: {fault.reason}{in_brackets(code_location(type(algorithm).train))}"
            text = f"round {round.number}: no reply to {type(algorithm).__name__} can be used; that of client {reason}"
            raise RefusedReply(text) from fault.error
        if fault.error is not None:
            raise fault.error


def _require_rows(algorithm: Algorithm, message: Message, selection: Selection) -> None:
    """Raise `InvalidValue` unless what is sent has one row for all who receive it, or one for each."""
    selected = len(selection.clients)
    for name, rows in message.items():
        if len(rows) not in ((1, selected + 1) if selection.idle else (1, selected, selected + 1)):
            idle = " and those that only train" if selection.idle else ""
            allowed = f"one for all, such as model.unsqueeze(0), or one for each of {selected} selected clients{idle}"
            sent = f"{type(algorithm).__name__}.send gives {name!r} {len(rows)} rows: give it"
            raise InvalidValue(f"{sent} {allowed}{in_brackets(code_location(type(algorithm).send))}")


def _checked_model(algorithm: Algorithm, hook: Literal["setup", "receive", "update"], initial: Tensor) -> Tensor:
    """Return the global model. Raise `InvalidValue` unless `hook` left one like `initial`, and a state for checkpoints."""
    wrong = _wrong_state(algorithm)
    model = initial if wrong else algorithm.model()
    if model.shape != initial.shape:
        remedy = "of one row for each client take one, such as weighted_mean(replies['model'], replies.weights)"
        wrong = f"left a global model of shape {list(model.shape)}, not {list(initial.shape)}: {remedy}"
    elif model.dtype != initial.dtype:
        wrong = f"left a global model of {model.dtype}, not {initial.dtype}: convert it, such as model.float()"
    if wrong:
        location = in_brackets(code_location(getattr(type(algorithm), hook)))
        raise InvalidValue(f"{type(algorithm).__name__}.{hook} {wrong}{location}")
    for method in algorithm.nested():  # no graph outlives its round
        method.state = {n: t if t.grad_fn is None else t.detach() for n, t in method.state.items()}
    return model.detach()


def _wrong_state(algorithm: Algorithm) -> str:
    if not hasattr(algorithm, "state") or not hasattr(algorithm, "plan"):
        return "has not kept the plan and made the state: begin it with super().setup(plan)"
    for method in algorithm.nested():
        for name, value in method.state.items():
            if not isinstance(value, Tensor):
                return f"left {type(value).__name__} in self.state[{name!r}], where a checkpoint holds tensors: make it one"
            if "." in name or "@" in name:
                return f"left self.state[{name!r}]: a name there has no dot or @, which stand for what fedloom adds"
    return ""
