"""Shifts, prototypes and discriminants folded into a linear head, compared with their outputs.

Also tests samples and features of a cohort.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn import functional as F

from fedloom.algorithms.linear_head import (
    LinearHead,
    discriminant,
    nearest_prototype,
    shifted,
    two_heads,
)
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.local.cohort import Cohort
from fedloom.rounds.engine import Job
from fedloom.task import Task
from naive_personal import World


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


Z, WEIGHT, BIAS = drawn(7, 4), drawn(2, 3, 4, seed=1), drawn(2, 3, seed=2)
"""Features and the heads of two clients."""


def cohort_of(engine: type[RowsEngine], task: Task, clients: list[int]) -> Cohort:
    return engine(task).cohort(
        World().round(1), [Job(i, slot, {}) for slot, i in enumerate(clients)]
    )


def outputs(head: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack([Z @ weight.T + bias for weight, bias in zip(*head, strict=True)])


def test_two_heads_add_up() -> None:
    second_heads = drawn(2, 3, 4, seed=3), drawn(2, 3, seed=4)
    torch.testing.assert_close(
        outputs(two_heads((WEIGHT, BIAS), second_heads)),
        outputs((WEIGHT, BIAS)) + outputs(second_heads),
    )


def test_a_shift_of_the_features_is_one_of_the_bias() -> None:
    shift = drawn(2, 4, seed=5)
    expected = torch.stack([(Z + m) @ w.T + b for m, w, b in zip(shift, WEIGHT, BIAS, strict=True)])
    torch.testing.assert_close(outputs(shifted((WEIGHT, BIAS), shift)), expected)


def test_the_largest_output_is_that_of_the_nearest_prototype() -> None:
    prototypes, present = (
        drawn(2, 3, 4, seed=6),
        torch.tensor([[True, True, True], [True, False, True]]),
    )
    distances = torch.stack([torch.cdist(Z, points) for points in prototypes])
    distances[1, :, 1] = torch.inf
    folded = outputs(nearest_prototype(prototypes, present))
    assert torch.equal(folded.argmax(2), distances.argmin(2))
    differences = folded[0] + distances[0].square()
    torch.testing.assert_close(differences, Z.square().sum(1, keepdim=True).expand(-1, 3))


def test_the_softmax_of_a_discriminant_is_the_posterior_of_gaussian_classes() -> None:
    means, root, prior = (
        drawn(3, 4, seed=7),
        drawn(4, 4, seed=8),
        torch.tensor([0.2, 0.0, 0.8], dtype=torch.float64),
    )
    covariance = root @ root.T + torch.eye(4)
    joint = torch.stack(
        [
            p * MultivariateNormal(m, covariance).log_prob(Z).exp()
            for m, p in zip(means, prior, strict=True)
        ],
        1,
    )
    weight, bias = discriminant(means, covariance, prior)
    torch.testing.assert_close(
        F.softmax(Z @ weight.T + bias, 1), joint / joint.sum(1, keepdim=True)
    )
    both = discriminant(
        means.expand(2, -1, -1), torch.stack([covariance, covariance]), prior.expand(2, -1)
    )
    torch.testing.assert_close(both[0][1], weight)


def test_a_head_is_read_and_written_in_rows() -> None:
    task = World(norm=True).task()
    head = LinearHead.of(cohort_of(RowsEngine, task, [0]), "a test")
    rows = drawn(2, task.layout.size, seed=9)
    written = head.put(rows, (WEIGHT, BIAS))
    assert torch.equal(head.get(written)[0], WEIGHT)
    assert torch.equal(head.get(written)[1], BIAS)
    others_mask = torch.ones(task.layout.size, dtype=torch.bool)
    for columns in head.unit:
        others_mask[columns] = False
    assert int((~others_mask).sum()) == 15
    assert torch.equal(written[:, others_mask], rows[:, others_mask])


@pytest.mark.parametrize("engine", [RowsEngine, StackedEngine])
def test_a_cohort_gives_samples_and_features_of_models_with_buffers(
    engine: type[RowsEngine],
) -> None:
    world = World(norm=True)
    task, clients = world.task(), [1] if engine is RowsEngine else [1, 3, 2]
    cohort = cohort_of(engine, task, clients)
    rows = task.initial + 0.1 * drawn(len(clients), task.layout.size, seed=10).abs()
    features, counts = cohort.features(rows), cohort.label_counts
    means = cohort.class_means(features)
    for k, (client, batches) in enumerate(zip(clients, cohort.in_order(4), strict=True)):
        x, y = world.data(client)
        read = list(batches)
        assert [len(batch.labels) for batch in read[:-1]] == [4] * (len(y) // 4 - (len(y) % 4 == 0))
        assert torch.equal(torch.cat([batch.inputs for batch in read]), x)
        assert torch.equal(cohort.samples[k].labels, y)
        net = world.fresh()
        task.layout.load(net, rows[k])
        net.eval()
        z = net.features(x)
        torch.testing.assert_close(features[k], z.detach())
        for c in range(world.classes):
            assert int(counts[k, c]) == int((y == c).sum())
            expected = (
                z[y == c].mean(0) if bool((y == c).any()) else torch.zeros(4, dtype=torch.float64)
            )
            torch.testing.assert_close(means[k, c], expected.detach())
