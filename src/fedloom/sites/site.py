"""A site: it introduces itself, trains and evaluates models.

Each answer depends on a message, the site's data and its memory. The state between two messages is
on disk, since Flower may start a process for each message.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

import fedloom
from fedloom.algorithm import Algorithm
from fedloom.data.columns import TableInputs
from fedloom.data.partition import Partition, split_train_test
from fedloom.data.sets.table import table_dataset
from fedloom.engines.rows import RowsEngine
from fedloom.engines.work import step_threads, using_threads
from fedloom.errors import DamagedCheckpoint, InvalidValue, RefusedReply, quoted
from fedloom.method import components
from fedloom.parts.building import build
from fedloom.parts.course import Course, client_pipeline
from fedloom.parts.pipeline import Pipeline
from fedloom.records import INTEGERS, Plan, TensorSpec
from fedloom.round import SIMULATED, Round
from fedloom.rounds.engine import Fault, Job
from fedloom.secure import from_layers, to_layers
from fedloom.secure.wire import OCCASIONS
from fedloom.sites.agreement import Deployment, deployment, layout_digest
from fedloom.sites.messages import Refusal, Words, pack, whole_number
from fedloom.sites.node_config import Identity, NodeConfig
from fedloom.sites.secure_round import exchanges_layers, layer_exchange
from fedloom.sites.site_data import csv_options, own_table, table_roles
from fedloom.sites.site_peer import SitePeer
from fedloom.sites.site_task import KeptTask, OwnData, SiteTask, own_task, simulated_task
from fedloom.state.client_files import ClientFiles
from fedloom.survey.federated_statistics import Values, answer, client_columns, columns_of
from fedloom.task import Task

_EVERYTHING = 1 << 62  # bytes of clients' memory that stay in RAM

_logger = logging.getLogger("flwr.fedloom")


class Site:
    """The site that `config` describes, in a federation with these `settings`."""

    def __init__(self, settings: Deployment, config: NodeConfig) -> None:
        self.settings, self.config, self.number = settings, config, config.number

    @classmethod
    def of(cls, run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> "Site":
        """Return the site of a SuperNode.

        Raises:
            InvalidValue: The configurations are not valid or do not match; the text is one line.
        """
        settings, config = deployment(run_config), NodeConfig.read(node_config)
        if config.sites not in (None, settings.clients):
            clients = f"data.clients of the federation is {settings.clients}"
            raise InvalidValue(
                f"node configuration: num-partitions is {config.sites}, but {clients}"
            )
        if config.number >= settings.clients:
            raise InvalidValue(
                f"partition-id {config.number} is not one of 0 to {settings.clients - 1} "
                "(data.clients)"
            )
        return cls(settings, config)

    def hello(self, words: Words) -> RecordDict:
        """Introduce this site, with its number of samples.

        A site with a table has no number before the federation has agreed on columns.
        """
        introduction = {
            "site": self.number,
            "own": self.config.data is not None,
            "fedloom": fedloom.__version__,
        }
        if words.get("data") is None:
            return pack({**introduction, "samples": 1, "tests": 0})
        if exchanges_layers(build(self.settings.algorithm)):
            self._require_identity()
        task = self._task(words, self.number)
        tests = 0 if task.local_test is None else len(task.local_test[self.number])
        samples, layout = len(task.partition[self.number]), layout_digest(task)
        return pack({**introduction, "samples": samples, "tests": tests, "layout": layout})

    def statistics(self, words: Words) -> RecordDict:
        """Answer a request of `federated_statistics` about the columns of the training rows."""
        columns = (
            self._table(self.config.data)
            if self.config.data and words.get("data") is None
            else None
        )
        if columns is None:
            columns = client_columns(self._task(words, self.number), self.number)
        return pack({"answer": answer(columns, words, self.config.smallest)})

    def _table(self, source: str) -> dict[str, Values]:
        """Return the columns of this site's table before the sites have agreed on columns."""
        configuration = self.settings.configuration
        roles, table = table_roles(configuration), own_table(source, csv_options(configuration))
        if roles is None or table is None:
            raise InvalidValue(
                f"site {self.number}: {source} is not a table, but the federation's data are"
            )
        dataset = table_dataset("table", *table, roles, source)
        if not isinstance(dataset.encoding, TableInputs):
            needed = "need an example at the server: path in table(...)"
            raise InvalidValue(f"site {self.number}: texts and pictures in a table {needed}")
        if lists := [column.name for column in dataset.encoding.columns if column.width > 1]:
            remedy = "make a column of each number, or let all sites bring arrays"
            raise InvalidValue(
                f"site {self.number}: column {quoted(lists[0])} of {source} contains lists: "
                f"{remedy}"
            )
        train, share = (
            Partition.of([np.arange(len(dataset.train))]),
            configuration.data.local_test,
        )
        if share is not None and not len(dataset.test):
            train, _ = split_train_test(train, configuration.seed, share)
        return columns_of(dataset, dataset.train[torch.from_numpy(train.indices)])

    def train(self, words: Words, inbox: Mapping[str, Tensor]) -> RecordDict:
        """Handle a train message.

        Args:
            words: The client, the round, the version of the memory, and the expected shapes.
            inbox: Tensors that the server sent, one row each.

        Returns:
            The reply.

        Raises:
            Refusal: The client cannot train.
            RefusedReply: The message is not valid.
        """
        round, client = self._addressed(words)
        engine, memory, version = self._remembering(words, round, client, inbox)
        memory_before = engine.store.read(client)
        pipeline = self._pipeline(engine.task, round, inbox)
        expected = _shapes(words.get("expected"))
        # The site's configuration decides about the exchange, so the server cannot request an
        # unmixed model.
        exchange = None if expected is None else layer_exchange(pipeline)
        peer = None if exchange is None else self._peer(words, round)
        if exchange and peer and words.get("exchanged") is True:
            both = peer.exchanged()
            exchanged, as_sent = (
                from_layers(layers, exchange.units(), engine.task.initial) for layers in both
            )
            # Another site may have spoilt a layer: the server's weights replace those not finite.
            inbox = {
                **inbox,
                "model": torch.where(exchanged.isfinite(), exchanged, as_sent).unsqueeze(0),
            }
            _require_sound(engine.task, inbox)
        job = Job(client, None if expected is None else 0, dict(inbox))
        with using_threads(step_threads(engine.task)):
            (result,) = engine.train_chunk(pipeline, round, expected or {}, [job])
        if isinstance(result, Fault):
            _logger.error(
                "site %d: round %d: %s",
                self.number,
                round.number,
                result.reason,
                exc_info=result.error,
            )
            raise Refusal({"refused": result.reason})
        memory_after = engine.store.read(client)
        written = any(
            tensor is not memory_before.get(name) for name, tensor in memory_after.items()
        )
        if written:
            memory.write(self.number, round.number, memory_after)
        needed = {version, *(older for older in words.get("keep", []) if type(older) is int)}
        memory.remove_before(self.number, round.number, needed)
        tensors = {} if expected is None else dict(result.tensors)
        if exchange and peer:
            peer.leave()
            if exchange.exchanges("before_upload"):
                peer.keep(to_layers(tensors.pop("model"), exchange.units()))
        figures = {name: float(value) for name, value in result.metrics.items()}
        remembered = round.number if written else version
        return pack(
            {"site": self.number, "round": round.number, "memory": remembered, "figures": figures},
            tensors,
        )

    def exchange(self, words: Words, inbox: Mapping[str, Tensor], parcel: bytes) -> RecordDict:
        """Answer a step of an exchange of layers, or upload this site's layers after it.

        Args:
            words: The client, the round, and the step of the exchange.
            inbox: Tensors that the server sent, one row each.
            parcel: The letters of the step.

        Returns:
            The reply, with a parcel.

        Raises:
            RefusedReply: The message is not valid in this exchange.
        """
        round, client = self._addressed(words)
        run, when, peer = str(words.get("run")), str(words.get("when")), self._peer(words, round)
        if words.get("upload") is True:
            return pack({"site": self.number}, parcel=peer.upload(run))
        method = layer_exchange(client_pipeline(build(self.settings.algorithm), round.number, {}))
        if method is None or when not in OCCASIONS or not method.exchanges(when):
            raise RefusedReply(f"no exchange takes place {when:.40} in round {round.number}")

        def layers() -> list[bytes]:
            return (
                peer.trained()
                if when == "before_upload"
                else self._sent(self._task(words, client), round, inbox)
            )

        return pack(
            {"site": self.number}, parcel=peer.answer(parcel, run, when, method.rules(), layers)
        )

    def _sent(self, task: Task, round: Round, inbox: Mapping[str, Tensor]) -> list[bytes]:
        """Return the layers of the server's model, for an exchange before training."""
        _require_sound(task, inbox)
        method = layer_exchange(self._pipeline(task, round, inbox))
        model = inbox.get("model")
        if method is None or model is None or model.shape != (1, task.layout.size):
            raise RefusedReply("the server sent no whole model to exchange")
        return to_layers(model[0], method.units())

    def evaluate(self, words: Words, inbox: Mapping[str, Tensor]) -> RecordDict:
        """Evaluate the client's model, or the received one, on the client's test samples.

        Args:
            words: The client, the round, and the version of the memory.
            inbox: Tensors that the server sent, one row each.

        Returns:
            The number of samples, and totals by name.
        """
        round, client = self._addressed(words)
        engine, _, _ = self._remembering(words, round, client, inbox)
        pipeline = self._pipeline(engine.task, round, inbox)
        if words.get("given") is True:
            pipeline = Pipeline(Algorithm())  # the client uses the received model
        with using_threads(step_threads(engine.task)):
            (tally,) = engine.evaluate(pipeline, round, [Job(client, None, dict(inbox))])
        totals = {name: total[0].tolist() for name, total in tally.totals.items()}
        return pack({"samples": int(tally.samples), "totals": totals})

    def _require_identity(self) -> Identity:
        """Raise `InvalidValue` if this site has no key to prove its identity to the others."""
        if self.config.identity is None:
            example = "identity='keys/site-0/site.key' peers='keys/site-0/peers.pub'"
            remedy = (
                "set its key and the public keys of all sites in the node configuration "
                f"({example})"
            )
            raise InvalidValue(
                f"site {self.number}: {self.settings.algorithm} needs the keys of the sites: "
                f"{remedy}"
            )
        return self.config.identity

    def _peer(self, words: Words, round: Round) -> SitePeer:
        return SitePeer(
            self.config.folder(words.get("federation")),
            self.config,
            self._require_identity(),
            round,
        )

    def _addressed(self, words: Words) -> tuple[Round, int]:
        """Return the round and the client's number in it.

        Raises:
            RefusedReply: The message is for another site.
        """
        if words.get("site") != self.number:
            raise RefusedReply(f"this is site {self.number}, not {words.get('site')!r:.40}")
        return _round(words.get("round")), whole_number(
            words, "client", 0, self.settings.clients - 1
        )

    def _remembering(
        self, words: Words, round: Round, client: int, inbox: Mapping[str, Tensor]
    ) -> tuple[RowsEngine, ClientFiles, int]:
        """Return an engine with this client's memory after the round in the words.

        The memory has a file for each round that wrote to it, so a site that trains twice in a
        round returns the same answer.

        Returns:
            The engine, the client's files, and the round of the memory.
        """
        cached = self._cached_task(words)
        task = cached.for_client(self._share, client, self.settings.clients)
        _require_sound(task, inbox)
        memory = ClientFiles(self.config.folder(words.get("federation")), private=True)
        version = whole_number(words, "memory", 0, round.number)
        try:
            remembered = memory.read(self.number, version) if version else {}
        except DamagedCheckpoint as error:
            reason = f"its memory of round {version} is lost ({error}); it starts again without it"
            raise Refusal({"refused": reason, "lost": True}) from None
        engine = RowsEngine(task, cached.proof, memory_budget=_EVERYTHING)
        engine.begin(task, None)
        if remembered:
            engine.store.write(client, remembered)
            engine.store.commit()
        return engine, memory, version

    def _pipeline(self, task: Task, round: Round, inbox: Mapping[str, Tensor]) -> Pipeline:
        """Return the pipeline of a round, without the server's state."""
        method = build(self.settings.algorithm)
        plan = Plan(  # only the server half uses the sites' sizes, which a site does not know
            task.layout, task.initial, round.clients, round.participants, round.rounds, round.seed,
            task.dataset.classes, torch.ones_like, task.model, remote=True, poisson=round.poisson, training=task.training,
        )  # fmt: skip
        Course(method).setup(plan)
        pipeline = client_pipeline(method, round.number, dict(inbox))
        for component in components(method):
            component.state = {}
        return pipeline

    def _task(self, words: Words, client: int) -> SiteTask:
        """Return the task in which this client has this site's samples."""
        return self._cached_task(words).for_client(self._share, client, self.settings.clients)

    @property
    def _share(self) -> int:
        """Client of the cached task that has this site's samples."""
        return self.number if self.config.data is None else 0

    def _cached_task(self, words: Words) -> KeptTask:
        """Return the task that this process stores for the deployment."""
        if self.config.data is None:
            return simulated_task(self.settings.text)
        return own_task(OwnData.of(self.settings, self.config, words.get("data")))


def _shapes(value: Any) -> dict[str, TensorSpec] | None:
    """Return the names and shapes of the expected reply; None if no reply is expected.

    Raises:
        RefusedReply: The value is not a table of shapes.
    """
    if value is None:
        return None
    try:
        return {
            str(name): TensorSpec(tuple(int(size) for size in shape), None)
            for name, shape in value.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise RefusedReply("the server sent no valid shapes of the expected reply") from None


def _round(value: Any) -> Round:
    """Return the round in the words.

    Raises:
        RefusedReply: It is not valid.
    """
    try:
        entries = {
            field.name: value[field.name] for field in fields(Round) if field.name not in SIMULATED
        }
        entries["selected"] = tuple(int(client) for client in entries["selected"])
        rates = [
            entries[name] for name in ("learning_rate", "initial_learning_rate", "rate_change")
        ]
        sound = all(0 < rate < math.inf for rate in rates) and type(entries["poisson"]) is bool
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise RefusedReply("the server sent no valid round")
    for name in ("number", "rounds", "clients", "participants", "seed"):
        whole_number(entries, name, 0, 1 << 62)
    return Round(**entries)


def _require_sound(task: Task, inbox: Mapping[str, Tensor]) -> None:
    """Check that the server's message has one row of each tensor, and a model of this task.

    Raises:
        RefusedReply: It does not.
    """
    for name, rows in inbox.items():
        if rows.dim() == 0 or len(rows) != 1:
            raise RefusedReply(
                f"the server sent {name!r:.40} of shape {list(rows.shape)}, expected one row"
            )
    model, layout = inbox.get("model"), task.layout
    if model is not None:
        if model.dtype != layout.dtype or model.dim() != 2 or model.shape[1] > layout.size:
            shape = f"{model.dtype} {list(model.shape)}"
            raise RefusedReply(f"the server sent a model of {shape}, not a model of this task")
        if not bool(torch.isfinite(model).all()):
            raise RefusedReply("the server sent a model that is not finite")
    integers = inbox.get(INTEGERS)
    if integers is not None and (integers.dtype, tuple(integers.shape)) != (
        torch.int64,
        (1, layout.integers),
    ):
        raise RefusedReply("the server sent integer buffers of another model")
