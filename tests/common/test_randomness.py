"""Named random streams do not depend on the place or time of a draw."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedloom as fl
from batch_order import batch_order
from fedloom.algorithm.records import uniform
from fedloom.common.randomness import global_stream, numpy_stream, stream, stream_bytes, stream_seed
from fedloom.common.round import Round


def test_the_same_name_gives_the_same_numbers() -> None:
    numbers = torch.rand(5, generator=stream(3, "batches", round=2, client=7))
    torch.rand(100, generator=stream(3, "select", round=2))
    assert torch.equal(numbers, torch.rand(5, generator=stream(3, "batches", round=2, client=7)))
    assert (numpy_stream(3, "partition").random(5) == numpy_stream(3, "partition").random(5)).all()


def test_other_names_give_other_seeds() -> None:
    names = itertools.product(range(3), ("batches", "select"), range(4), range(-1, 4))
    seeds = [stream_seed(seed, purpose, round=r, client=c) for seed, purpose, r, c in names]
    assert len(set(seeds)) == len(seeds)


def test_no_two_of_300_000_streams_agree() -> None:
    """No pair of streams has equal seeds.

    Seeds of 32 bits would give about n^2 / 2^33 equal pairs among n streams, here 10.
    """
    names = [(round, client) for round in range(300) for client in range(1000)]
    seeds = (
        np.array([stream_seed(0, "batches", round=r, client=c) for r, c in names], dtype=np.uint64)
        & 0xFFFFFFFF
    )
    values, counts = np.unique(seeds, return_counts=True)
    alike = np.flatnonzero(seeds == values[counts > 1][0])[:2].tolist()
    pair = [
        torch.rand(3, generator=stream(0, "batches", round=r, client=c))
        for r, c in (names[k] for k in alike)
    ]
    assert not torch.equal(*pair)
    beginnings = {stream_bytes(8, 0, "batches", round=r, client=c) for r, c in names}
    assert len(beginnings) == len(names)
    for r, c in names[:3]:
        state = (
            stream(0, "batches", round=r, client=c)
            .get_state()
            .numpy()[24 : 24 + 8 * 624]
            .view(np.uint64)
        )
        assert state.astype(np.uint32).tobytes() == stream_bytes(
            4 * 624, 0, "batches", round=r, client=c
        )


def test_a_stream_can_be_saved_and_restored() -> None:
    generator = stream(3, "batches", round=2, client=7)
    torch.randn(7, generator=generator)
    state = generator.get_state()
    expected = torch.randn(5, generator=generator), torch.randperm(9, generator=generator)
    restored = torch.Generator()
    restored.set_state(state)
    assert torch.equal(torch.randn(5, generator=restored), expected[0])
    assert torch.equal(torch.randperm(9, generator=restored), expected[1])


def test_streams_are_uniform_and_uncorrelated() -> None:
    streams = torch.stack(
        [
            torch.rand(700, generator=stream(1, "batches", client=c), dtype=torch.float64)
            for c in range(300)
        ]
    )
    assert abs(float(streams.mean()) - 0.5) < 4 * (1 / 12 / streams.numel()) ** 0.5
    assert abs(float(streams[:, 0].mean()) - 0.5) < 4 * (1 / 12 / 300) ** 0.5
    correlations = torch.corrcoef(streams).fill_diagonal_(0).abs()
    assert float(correlations.max()) < 6 / 700**0.5


def test_the_global_generator_is_a_stream_for_a_while() -> None:
    random_state = torch.get_rng_state()
    with global_stream(3, "layers", client=5):
        drawn = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(drawn, torch.rand(4, generator=stream(3, "layers", client=5)))


def test_streams_are_stable_over_versions() -> None:
    """The stored values must not change, because a change alters all published results."""
    assert torch.randint(
        1000, (4,), generator=stream(42, "batches", round=3, client=11)
    ).tolist() == [
        873,
        425,
        669,
        697,
    ]
    assert stream_seed(0, "select", round=1) == 3597553764839075397
    assert stream_seed(42, "batches", round=3, client=11) == 4053908831382709043


def a_round(number: int = 1, clients: int = 10, participants: int = 4, seed: int = 0) -> Round:
    return Round(number, 100, seed, clients, participants, 0.1, 0.1)


def test_selection_is_uniform_without_replacement() -> None:
    counts = torch.zeros(10)
    first_slots = torch.zeros(10)
    for number in range(1, 2001):
        chosen = uniform(a_round(number))
        assert len(set(chosen)) == 4
        counts[list(chosen)] += 1
        first_slots[chosen[0]] += 1
    # chi-square test, 9 degrees of freedom, 0.1 %
    assert float(((counts - 800) ** 2 / 480).sum()) < 27.9
    # each client is equally likely in the first slot
    assert float(((first_slots - 200) ** 2 / 200).sum()) < 27.9


def test_selecting_few_of_many_is_quick_and_right() -> None:
    chosen = uniform(a_round(clients=10**9, participants=100))
    assert len(set(chosen)) == 100
    assert all(0 <= client < 10**9 for client in chosen)
    assert sorted(uniform(a_round(clients=7, participants=7))) == list(range(7))


def test_batches_cover_each_epoch_once() -> None:
    order = list(batch_order(23, stream(0, "batches"), batch_size=5, epochs=3))
    assert [len(batch) for batch in order] == [5, 5, 5, 5, 3] * 3
    epochs = [torch.cat(order[k : k + 5]).tolist() for k in (0, 5, 10)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_batches_by_steps_short_batches_and_drops() -> None:
    assert [len(b) for b in batch_order(23, stream(0, "b"), batch_size=5, steps=7)] == [
        5,
        5,
        5,
        5,
        3,
        5,
        5,
    ]
    assert [len(b) for b in batch_order(23, stream(0, "b"), batch_size=5, drop_last=True)] == [
        5
    ] * 4
    assert [len(b) for b in batch_order(3, stream(0, "b"), batch_size=5, drop_last=True)] == [3]
    assert [len(b) for b in batch_order(21, stream(0, "b"), batch_size=5, smallest=2)] == [5] * 4
    assert [len(b) for b in batch_order(21, stream(0, "b"), batch_size=None, epochs=2)] == [21, 21]
    assert list(batch_order(1, stream(0, "b"), batch_size=5, smallest=2)) == []
    assert torch.cat(list(batch_order(6, None, batch_size=4))).tolist() == list(range(6))


class DrawsAlways(nn.Module):
    """A model with dropout that remains active in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.dropout(torch.relu(self.hidden(images.flatten(1))), 0.5)
        logits: Tensor = self.out(hidden)
        return logits


def figures_of_a_run(model: nn.Module, method: str, engine: str) -> list[dict[str, float]]:
    task = fl.make_task("digits", model=model, clients=3, local_test=0.25)
    options = {"rounds": 2, "engine": engine, "evaluate_every": 1, "personal_every": 1}
    history = fl.run(method, task, quiet=True, **options).history  # type: ignore[arg-type]
    return [{n: v for n, v in row.items() if "loss" in n or "accuracy" in n} for row in history]


@pytest.mark.parametrize("engine", ["rows", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "qfedavg", "ditto"])
def test_runs_neither_use_nor_move_the_global_generator(method: str, engine: str) -> None:
    model, results = DrawsAlways(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(figures_of_a_run(model, method, engine))
        assert torch.equal(torch.get_rng_state(), before)
    assert results[0] == results[1]


def test_runs_in_several_threads_are_those_of_one() -> None:
    model = DrawsAlways()
    expected = figures_of_a_run(model, "fedavg", "rows")
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(figures_of_a_run, model, "fedavg", "rows") for _ in range(4)]
    assert all(run.result() == expected for run in runs)
