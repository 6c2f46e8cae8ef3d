"""Streams are named, so they do not depend on where or when they are drawn."""

from __future__ import annotations

import itertools

import torch

from batch_order import batch_order
from fedloom.algorithm import uniform
from fedloom.randomness import numpy_stream, stream, stream_seed
from fedloom.round import Round


def test_the_same_name_gives_the_same_numbers() -> None:
    first = torch.rand(5, generator=stream(3, "batches", round=2, client=7))
    torch.rand(100, generator=stream(3, "select", round=2))
    assert torch.equal(first, torch.rand(5, generator=stream(3, "batches", round=2, client=7)))
    assert (numpy_stream(3, "partition").random(5) == numpy_stream(3, "partition").random(5)).all()


def test_other_names_give_other_seeds() -> None:
    names = itertools.product(range(3), ("batches", "select"), range(4), range(-1, 4))
    seeds = [stream_seed(seed, purpose, round=r, client=c) for seed, purpose, r, c in names]
    assert len(set(seeds)) == len(seeds)


def test_streams_are_stable_over_versions() -> None:
    """Written down once: another value would change every published result."""
    assert stream_seed(0, "select", round=1) == 3597553764839075397
    assert stream_seed(42, "batches", round=3, client=11) == 4053908831382709043


def a_round(number: int = 1, clients: int = 10, participants: int = 4, seed: int = 0) -> Round:
    return Round(number, 100, seed, clients, participants, 0.1, 0.1)


def test_selection_is_uniform_without_replacement() -> None:
    counts = torch.zeros(10)
    places = torch.zeros(10)
    for number in range(1, 2001):
        chosen = uniform(a_round(number))
        assert len(set(chosen)) == 4
        counts[list(chosen)] += 1
        places[chosen[0]] += 1
    assert float(((counts - 800) ** 2 / 480).sum()) < 27.9  # chi-square, 9 degrees of freedom, 0.1 %
    assert float(((places - 200) ** 2 / 200).sum()) < 27.9  # any client is as likely in the first slot


def test_selecting_few_of_many_is_quick_and_right() -> None:
    chosen = uniform(a_round(clients=10**9, participants=100))
    assert len(set(chosen)) == 100
    assert all(0 <= client < 10**9 for client in chosen)
    assert sorted(uniform(a_round(clients=7, participants=7))) == list(range(7))


def test_batches_cover_each_epoch_once() -> None:
    client_task = list(batch_order(23, stream(0, "batches"), batch_size=5, epochs=3))
    assert [len(batch) for batch in client_task] == [5, 5, 5, 5, 3] * 3
    epochs = [torch.cat(client_task[k : k + 5]).tolist() for k in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_batches_by_steps_short_batches_and_drops() -> None:
    assert [len(b) for b in batch_order(23, stream(0, "b"), batch_size=5, steps=7)] == [5, 5, 5, 5, 3, 5, 5]
    assert [len(b) for b in batch_order(23, stream(0, "b"), batch_size=5, drop_last=True)] == [5] * 4
    assert [len(b) for b in batch_order(3, stream(0, "b"), batch_size=5, drop_last=True)] == [3]
    assert [len(b) for b in batch_order(21, stream(0, "b"), batch_size=5, smallest=2)] == [5] * 4
    assert [len(b) for b in batch_order(21, stream(0, "b"), batch_size=None, epochs=2)] == [21, 21]
    assert list(batch_order(1, stream(0, "b"), batch_size=5, smallest=2)) == []
    assert torch.cat(list(batch_order(6, None, batch_size=4))).tolist() == list(range(6))
