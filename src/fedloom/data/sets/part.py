"""A part of another data set, for runs that are to be short."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from fedloom.config.expression import parse
from fedloom.data.dataset import Dataset, Samples, datasets
from fedloom.errors import InvalidValue
from fedloom.randomness import stream


@datasets.register("part")
def part(*, of: str = "digits", samples: Annotated[int, Field(ge=2)] = 1000, seed: int = 0) -> Dataset:
    """A random part of another set: `part(of='mnist(normalise=half)', samples=6000)`.

    `samples` in all, of the training and of the test part in proportion to their sizes, at least one of each; the same ones
    for every other seed of a run. All of the set where it is no larger. Normalisation is that of the whole set.
    Raises `InvalidValue` where `of` names no whole data set.
    """
    call = parse(of)
    if call.name == "part":
        raise InvalidValue("part: of must name a whole data set, not a part of one")
    whole: Dataset = datasets.build(call)
    total = len(whole.train) + len(whole.test)
    if samples >= total:
        return whole
    tests = min(max(1, round(samples * len(whole.test) / total)), samples - 1)
    train, test = _drawn(whole.train, samples - tests, seed, "train"), _drawn(whole.test, tests, seed, "test")
    return replace(whole, train=train, test=test)


def _drawn(samples: Samples, count: int, seed: int, name: str) -> Samples:
    """`count` of the samples at random, in their own order."""
    chosen = torch.randperm(len(samples), generator=stream(seed, f"part {name}"))[:count]
    return samples[chosen.sort().values]
