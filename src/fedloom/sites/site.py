"""A site: it introduces itself, trains and evaluates models.

Each answer depends on a message, the site's data and its memory. The state between two messages is
on disk, since Flower may start a process for each message.
"""

import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import RecordDict
from torch import Tensor

import fedloom
from fedloom.algorithm import Algorithm
from fedloom.common.errors import InvalidValue, RefusedReply
from fedloom.common.round import Round
from fedloom.engines.work import step_threads, using_threads
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.engine import Fault, Job
from fedloom.sites.agreement import Deployment, deployment, layout_digest
from fedloom.sites.messages import Refusal, Words, pack, whole_number
from fedloom.sites.node_config import NodeConfig
from fedloom.sites.site_columns import table_columns
from fedloom.sites.site_exchange import SiteExchange
from fedloom.sites.site_request import round_of, shapes_of
from fedloom.sites.site_state import SiteState
from fedloom.survey.federated_statistics import answer, client_columns

_logger = logging.getLogger("flwr.fedloom")


class Site:
    """The site that `config` describes, in a federation with these `settings`."""

    def __init__(self, settings: Deployment, config: NodeConfig) -> None:
        self.settings = settings
        self.config = config
        self.number = config.number
        self.state = SiteState(settings, config)
        self._exchange = SiteExchange(self.state)

    @classmethod
    def of(cls, run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> "Site":
        """Return the site of a SuperNode.

        Args:
            run_config: Run configuration of the app, with the configuration of the federation.
            node_config: Node configuration of the SuperNode, such as `partition-id`.

        Returns:
            The site, before it has read any data.

        Raises:
            InvalidValue: The configurations are not valid or do not match; the text is one line.
        """
        settings = deployment(run_config)
        config = NodeConfig.read(node_config)
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
        self._exchange.require_identity()
        task = self.state.task(words, self.number)
        tests = 0 if task.local_test is None else len(task.local_test[self.number])
        samples = len(task.partition[self.number])
        layout = layout_digest(task)
        return pack({**introduction, "samples": samples, "tests": tests, "layout": layout})

    def statistics(self, words: Words) -> RecordDict:
        """Answer a request of `federated_statistics` about the columns of the training rows."""
        if self.config.data and words.get("data") is None:
            columns = table_columns(self.settings.configuration, self.number, self.config.data)
        else:
            columns = client_columns(self.state.task(words, self.number), self.number)
        return pack({"answer": answer(columns, words, self.config.smallest)})

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
        engine, memory, version = self.state.remembering(words, round, client, inbox)
        memory_before = engine.store.read(client)
        pipeline = self.state.pipeline(engine.task, round, inbox)
        expected = shapes_of(words.get("expected"))
        exchange = None if expected is None else self._exchange.of_round(pipeline, words, round)
        if exchange is not None and words.get("exchanged") is True:
            inbox = exchange.received(engine.task, inbox)
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
        if exchange is not None:
            exchange.finish(tensors)
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
        answered = self._exchange.answer(words, round, client, inbox, parcel)
        return pack({"site": self.number}, parcel=answered)

    def evaluate(self, words: Words, inbox: Mapping[str, Tensor]) -> RecordDict:
        """Evaluate the client's model, or the received one, on the client's test samples.

        Args:
            words: The client, the round, and the version of the memory.
            inbox: Tensors that the server sent, one row each.

        Returns:
            The number of samples, and totals by name.
        """
        round, client = self._addressed(words)
        engine, _, _ = self.state.remembering(words, round, client, inbox)
        pipeline = self.state.pipeline(engine.task, round, inbox)
        if words.get("given") is True:
            pipeline = Pipeline(Algorithm())  # the client uses the received model
        with using_threads(step_threads(engine.task)):
            (tally,) = engine.evaluate(pipeline, round, [Job(client, None, dict(inbox))])
        totals = {name: total[0].tolist() for name, total in tally.totals.items()}
        return pack({"samples": int(tally.samples), "totals": totals})

    def _addressed(self, words: Words) -> tuple[Round, int]:
        """Return the round and the client's number in it.

        Raises:
            RefusedReply: The message is for another site.
        """
        if words.get("site") != self.number:
            raise RefusedReply(f"this is site {self.number}, not {words.get('site')!r:.40}")
        client = whole_number(words, "client", 0, self.settings.clients - 1)
        return round_of(words.get("round")), client
