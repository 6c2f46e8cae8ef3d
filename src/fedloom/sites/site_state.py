"""Everything that a site has for one message: its task, its memory and the round's pipeline."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.algorithm.method import components
from fedloom.algorithm.records import Plan
from fedloom.common.errors import DamagedCheckpoint
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.course import Course, client_pipeline
from fedloom.parts.pipeline import Pipeline
from fedloom.sites.agreement import Deployment
from fedloom.sites.messages import Refusal, Words, whole_number
from fedloom.sites.node_config import NodeConfig
from fedloom.sites.site_request import require_sound
from fedloom.sites.site_task import KeptTask, OwnData, SiteTask, own_task, simulated_task
from fedloom.state.client_files import ClientFiles
from fedloom.task import Task

_EVERYTHING = 1 << 62  # bytes of clients' memory that stay in RAM


class SiteState:
    """Task and memory of a site.

    Args:
        settings: Settings of the federation.
        config: Configuration of the site.
    """

    def __init__(self, settings: Deployment, config: NodeConfig) -> None:
        self.settings = settings
        self.config = config

    def remembering(
        self, words: Words, round: Round, client: int, inbox: Mapping[str, Tensor]
    ) -> tuple[RowsEngine, ClientFiles, int]:
        """Return an engine with this client's memory after the round in the words.

        The memory has a file for each round that wrote to it, so a site that trains twice in a
        round returns the same answer.

        Args:
            words: Words of the server's message. `memory` is the round of the memory, 0 for none.
            round: The round.
            client: Number of the client in it.
            inbox: Tensors that the server sent, one row each.

        Returns:
            The engine, the client's files, and the round of the memory.

        Raises:
            Refusal: The memory is lost. The site then starts again without it.
            RefusedReply: The message does not fit the task.
        """
        cached = self._cached_task(words)
        task = cached.for_client(self._share, client, self.settings.clients)
        require_sound(task, inbox)
        memory = ClientFiles(self.config.folder(words.get("federation")), private=True)
        version = whole_number(words, "memory", 0, round.number)
        try:
            remembered = memory.read(self.config.number, version) if version else {}
        except DamagedCheckpoint as error:
            reason = f"its memory of round {version} is lost ({error}); it starts again without it"
            raise Refusal({"refused": reason, "lost": True}) from None
        engine = RowsEngine(task, cached.proof, memory_budget=_EVERYTHING)
        engine.begin(task, None)
        if remembered:
            engine.store.write(client, remembered)
            engine.store.commit()
        return engine, memory, version

    def pipeline(self, task: Task, round: Round, inbox: Mapping[str, Tensor]) -> Pipeline:
        """Return the pipeline of a round, without the server's state.

        Args:
            task: The site's task.
            round: The round, with the numbers of clients and participants.
            inbox: Tensors that the server sent, one row each.

        Returns:
            The parts of the method that run at a client.
        """
        method = build(self.settings.algorithm)
        plan = Plan(
            layout=task.layout,
            initial=task.initial,
            clients=round.clients,
            participants=round.participants,
            rounds=round.rounds,
            seed=round.seed,
            classes=task.dataset.classes,
            sizes=torch.ones_like,  # only the server half uses sizes; a site does not know them
            module=task.model,
            remote=True,
            poisson=round.poisson,
            training=task.training,
        )
        Course(method).setup(plan)
        pipeline = client_pipeline(method, round.number, dict(inbox))
        for component in components(method):
            component.state = {}
        return pipeline

    def task(self, words: Words, client: int) -> SiteTask:
        """Return the task in which this client has this site's samples.

        Args:
            words: Words of the server's message, with the agreement about the sites' data.
            client: Number of the client in the round.

        Returns:
            A copy that the caller may change. The shares of the other clients are empty.
        """
        return self._cached_task(words).for_client(self._share, client, self.settings.clients)

    @property
    def _share(self) -> int:
        """Client of the cached task that has this site's samples."""
        return self.config.number if self.config.data is None else 0

    def _cached_task(self, words: Words) -> KeptTask:
        """Return the task that this process stores for the deployment."""
        if self.config.data is None:
            return simulated_task(self.settings.text)
        return own_task(OwnData.of(self.settings, self.config, words.get("data")))
