"""A part of another data set, for runs that are to be short."""

from __future__ import annotations

import torch

from fedloom.config.checks import require_at_least
from fedloom.config.expression import parse
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.errors import InvalidValue
from fedloom.randomness import stream


@datasets.register("part")
def part(*, of: str = "digits", samples: int = 1000, seed: int = 0) -> Dataset:
    """A random part of another set: `part(of='mnist(normalise=half)', samples=6000)`.

    `samples` in all, of the training and of the test part in proportion to their sizes, at least one of each; the same ones
    for every other seed of a run. All of the set where it is no larger. Normalisation is that of the whole set.
    Raises `InvalidValue` for fewer than 2 samples, or where `of` names no data set.
    """
    require_at_least("samples", samples, 2)
    call = parse(of)
    if call.name == "part":
        raise InvalidValue("part: of must name a whole data set, not a part of one")
    whole: Dataset = datasets.build(call)
    total = len(whole.train) + len(whole.test)
    if samples >= total:
        return whole
    tests = min(max(1, round(samples * len(whole.test) / total)), samples - 1)
    train, test = _drawn(whole.train, samples - tests, seed, "train"), _drawn(whole.test, tests, seed, "test")
    return Dataset(
        whole.name, train, test, whole.classes, whole.mean, whole.std, whole.vocabulary, whole.class_names
    )  # fmt: skip


def _drawn(samples: Samples, count: int, seed: int, name: str) -> Samples:
    """`count` of the samples at random, in their own order."""
    chosen = torch.randperm(len(samples), generator=stream(seed, f"part {name}"))[:count]
    return samples[chosen.sort().values]
