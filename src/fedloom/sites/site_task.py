"""Task of a site: made once for a deployment, cached in the process, copied for each message."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.common.randomness import stream_seed
from fedloom.data.noise import label_noises
from fedloom.data.partition import Partition
from fedloom.engines.proof import Proof, prove
from fedloom.engines.rows import RowsEngine
from fedloom.models.structure import copied
from fedloom.sites.agreement import Deployment, read_configuration
from fedloom.sites.node_config import NodeConfig
from fedloom.sites.site_data import DataAgreement
from fedloom.task import Task
from fedloom.task.fitting import mislabelled
from fedloom.task.making import make_task

MOST_TASKS = 16
"""Largest number of tasks in a process if sites have their own data.

A process has one site, except in tests.
"""

FileState = tuple[str, int, int, int]
"""Path of a file, its size, and the times at which its content and its directory entry changed."""


@dataclass(frozen=True)
class SiteTask(Task):
    """Task of one site. The other clients' samples are at other sites; their shares are empty."""

    def __post_init__(self) -> None:
        """Accept empty shares."""


@dataclass(frozen=True)
class KeptTask:
    """A task that the process stores between messages, with the proof of its shortcuts.

    Each message gets a copy of its model, so changes of one message do not affect another.
    """

    task: Task

    @cached_property
    def proof(self) -> Proof:
        """Shortcuts that the task allows in the engine of a site."""
        task = self.task
        return prove(task.model, task.dataset, task.train, task.training, stack=RowsEngine.stacks)

    def for_client(self, index: int, client: int, clients: int) -> SiteTask:
        """Return the task of one message.

        Args:
            index: Client of the stored task that has the site's samples.
            client: Number of this client in the federation.
            clients: Number of clients in the federation.

        Returns:
            A task with a copy of the model. Frozen weights are shared with the stored task.
        """
        task = self.task
        frozen = {
            id(weight): weight for weight in task.model.parameters() if not weight.requires_grad
        }

        def share(partition: Partition) -> Partition:
            sizes = np.zeros(clients, np.int64)
            sizes[client] = len(partition[index])
            return Partition.from_sizes(partition[index], sizes)

        return SiteTask(
            task.dataset,
            task.train,
            task.test,
            share(task.partition),
            copied(task.model, frozen),
            task.training,
            None if task.local_test is None else share(task.local_test),
        )


@dataclass(frozen=True)
class OwnData:
    """Everything that determines the task of a site with its own data.

    Attributes:
        text: Configuration of the federation, as TOML or as the path of a file.
        output: Output folder of the federation, which differs between deployments of one
            configuration.
        memory: Memory folder of the site.
        number: Number of the site, by which its label noise is drawn.
        source: Path or function of the site's data.
        files: State of the data's files; empty for a function, which is called once.
        agreed: Agreement of the sites about their data, as JSON.
    """

    text: str
    output: Path
    memory: Path
    number: int
    source: str
    files: tuple[FileState, ...]
    agreed: str

    @classmethod
    def of(cls, settings: Deployment, config: NodeConfig, agreed: Any) -> "OwnData":
        """Describe the data of a site, with the agreement from the server's message.

        Args:
            settings: The deployment.
            config: Node configuration of a site with its own data.
            agreed: Agreement of the sites from the server's message, as plain values; None if there
                is none yet.

        Returns:
            The description. It stays equal as long as the files do not change.
        """
        source = config.data
        assert source is not None, "the site has its own data"
        return cls(
            settings.text,
            settings.output,
            config.memory,
            config.number,
            source,
            _file_states(source),
            json.dumps(agreed, sort_keys=True),
        )


@lru_cache(maxsize=MOST_TASKS)
def own_task(own: OwnData) -> KeptTask:
    """Return the task of a site with its own data. The site is its only client.

    Raises:
        RefusedReply: The server does not describe the data.
        DataError: The data cannot be read.
        InvalidValue: The data do not fit the federation.
    """
    settings = read_configuration(own.text)
    dataset = DataAgreement.read(json.loads(own.agreed)).dataset(own.source, settings)
    train = dataset.train
    test = dataset.test
    samples = train.concatenate(test) if len(test) else train
    task = make_task(
        replace(dataset, train=samples, test=samples[:0]),
        partition=Partition.of([np.arange(len(train))]),
        model=settings.model,
        training=settings.training,
        local_test=None if len(test) else settings.data.local_test,
        metrics=settings.metrics,
        seed=settings.seed,
    )
    if len(test):
        task = replace(task, local_test=Partition.of([np.arange(len(train), len(samples))]))

    noise = label_noises.build_unless_none(settings.data.label_noise)
    if noise is not None:
        task = mislabelled(
            task, noise, stream_seed(settings.seed, "label noise", client=own.number)
        )
    return KeptTask(task)


@lru_cache(maxsize=1)
def simulated_task(text: str) -> KeptTask:
    """Return the task of a configuration, for sites that take shares of its data.

    Sites that share a process, as in tests, share the task.
    """
    settings = read_configuration(text)
    return KeptTask(settings.task(settings.seed))


def _file_states(source: str) -> tuple[FileState, ...]:
    """Return the states of a file, or of a folder and its content; empty for a missing path.

    Folders behind symbolic links are not searched, since links may form a circle.
    """
    paths = [Path(source)]
    for folder, folders, files in os.walk(source):
        paths += [Path(folder, name) for name in (*folders, *files)]

    states = []
    for path in sorted(paths):
        with suppress(OSError):
            status = path.stat()
            states.append(
                (str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            )
    return tuple(states)
