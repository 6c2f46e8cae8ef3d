"""Clients in lock step receive the same batches as in separate training.

Padding has zero weight.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.common.training import Passes, PassOptions, Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.local.batches import ClientLoader, lock_steps
from fedloom.rounds.engine import Job
from small_task import small_task
from stacked_support import assert_same, federated, perceptron, world


def loaders(sizes: list[int]) -> list[ClientLoader]:
    """Return loaders with consecutive numbers as inputs and labels."""
    total = torch.arange(sum(sizes))
    samples = Samples(total.float().unsqueeze(1), total)
    dataset = Dataset("numbers", samples, samples, sum(sizes))
    indices = total.split(sizes)
    return [
        ClientLoader(Samples(samples.inputs[rows], samples.labels[rows]), dataset)
        for rows in indices
    ]


def jobs(sizes: list[int], batch: int, epochs: int) -> list[list[tuple[Tensor, list[int]]]]:
    streams = [torch.Generator().manual_seed(client) for client in range(len(sizes))]
    return [
        list(Passes(epochs, batch_size=batch).orders(n, stream))
        for n, stream in zip(sizes, streams, strict=True)
    ]


Steps = list[tuple[list[int], int]]
"""Clients of a group and its number of steps."""


def taken(
    sizes: list[int], batch: int, epochs: int, *, in_step: bool = False, pad: bool = False
) -> tuple[list[list[list[int]]], Steps]:
    """Return the batches of each client without padding, and the groups with their steps."""
    batches: list[list[list[int]]] = [[] for _ in sizes]
    steps_of = []
    for group in lock_steps(
        loaders(sizes), jobs(sizes, batch, epochs), [None] * len(sizes), in_step=in_step, pad=pad
    ):
        members, steps = group.members, 0
        for group_batch in group.batches:
            steps += 1
            assert torch.equal(group_batch.inputs[..., 0], group_batch.labels.float())
            for row, client in enumerate(members):
                assert (
                    group_batch.step == len(batches[client])
                    if in_step
                    else (group_batch.step == 0) == (not batches[client])
                )
                real = group_batch.labels[row]
                if group_batch.share is not None:
                    share = group_batch.share[row]
                    real = real[share > 0]
                    # the shares are in double precision
                    assert share[share > 0].tolist() == [1 / len(real)] * len(real)
                batches[client].append(real.tolist())
        steps_of.append((members, steps))
    return batches, steps_of


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 17), min_size=2, max_size=5),
    st.integers(2, 6),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_every_client_takes_the_batches_it_would_take_alone(
    sizes: list[int], batch: int, epochs: int, in_step: bool, pad: bool
) -> None:
    batches, _ = taken(sizes, batch, epochs, in_step=in_step, pad=pad)
    for loader, passes, taken_batches in zip(
        loaders(sizes), jobs(sizes, batch, epochs), batches, strict=True
    ):
        labels = loader.samples.labels
        assert taken_batches == [
            batch.tolist() for order, counts in passes for batch in labels[order].split(counts)
        ]


def test_full_batches_are_stacked_and_short_ones_are_not() -> None:
    """Only full batches of several clients are stacked.

    17 and 13 samples in batches of 4 give four and three full batches per epoch and a batch of one
    sample each.
    """
    _, groups = taken([17, 13], 4, 2)
    together_steps = sum(steps for members, steps in groups if members == [0, 1])
    apart_steps = sum(steps for members, steps in groups if len(members) == 1)
    assert together_steps == 6  # full batches of the smaller client
    # the last batches of both clients, and the additional full batches of the larger client
    assert apart_steps == 2 + 2 + 2


def test_padded_clients_step_together_until_one_has_finished() -> None:
    _, groups = taken([17, 13, 5], 4, 2, pad=True)
    assert groups == [([0, 1, 2], 4), ([0, 1], 4), ([0], 2)]


def test_no_client_is_padded_if_that_doubles_the_work() -> None:
    assert taken([16, 2, 2], 16, 1, pad=True) == taken([16, 2, 2], 16, 1)


@pytest.mark.parametrize(
    "changes", [{}, {"momentum": 0.0}, {"steps": 7}, {"batch_size": None}], ids=str
)
def test_chains_of_unequal_clients_give_the_numbers_of_rows(changes: dict[str, object]) -> None:
    task = replace(world(epochs=3), model=perceptron(5, 7, 4))
    task = replace(task, training=replace(task.training, **changes))
    assert_same(federated(RowsEngine, task, "fedavg"), federated(StackedEngine, task, "fedavg"))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 9)),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_local_steps_are_those_that_clients_make(
    samples: int,
    batch_size: int | None,
    epochs: int,
    steps: int | None,
    drop_last: bool,
    smallest: int,
) -> None:
    training = Training(batch_size=batch_size, epochs=epochs, steps=steps, drop_last=drop_last)
    orders = Passes(epochs, steps, batch_size, drop_last, smallest).orders(samples, None)
    expected = sum(len(sizes) for _, sizes in orders)
    assert training.local_steps(torch.tensor([samples, samples]), smallest).tolist() == [
        expected,
        expected,
    ]


def test_a_mean_number_of_samples_makes_the_steps_of_its_parts() -> None:
    """The number of steps is E ceil(mean n / B), as in FedDC."""
    mean = torch.tensor([10.0, 10.2, 3.0])
    assert Training(batch_size=5, epochs=2).local_steps(mean).tolist() == [4, 6, 2]
    assert Training(batch_size=5, drop_last=True).local_steps(mean).tolist() == [2, 2, 1]
    assert Training(steps=7).local_steps(mean).tolist() == [7, 7, 7]


@pytest.mark.parametrize("options", [{"epochs": 0}, {"steps": 0}])
@pytest.mark.parametrize("local_schedule", ["constant", "cosine"])
def test_no_epochs_and_no_steps_train_nothing(options: PassOptions, local_schedule: str) -> None:
    """Zero epochs or steps in a method disable training and do not select the task's default."""
    task = small_task()
    task = replace(task, training=replace(task.training, epochs=2, local_schedule=local_schedule))
    start = task.initial.unsqueeze(0)
    cohort = RowsEngine(task).cohort(Round(1, 1, 0, task.clients, 1, 0.1, 0.1), [Job(0, 0, {})])
    trained = cohort.fit(start, **options)
    assert torch.equal(trained.model, start)
    assert trained.steps.tolist() == [0]
    assert trained.loss.isnan().all()
    with pytest.raises(
        InvalidValue, match="batch_size of local training must be at least 1, not 0"
    ):
        cohort.fit(start, batch_size=0)
