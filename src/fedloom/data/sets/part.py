"""A random part of another data set, for short runs."""

from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from fedloom.common.errors import InvalidValue
from fedloom.common.expression import parse
from fedloom.common.randomness import stream
from fedloom.data.dataset import Dataset, Samples, datasets


@datasets.register("part")
def random_part(
    *, of: str = "digits", samples: Annotated[int, Field(ge=2)] = 1000, seed: int = 0
) -> Dataset:
    """A random part of another set: `part(of='mnist(normalise=half)', samples=6000)`.

    Args:
        of: The set. Its normalisation stays.
        samples: How many in all, of the training and of the test samples in proportion to their
            numbers, at least one of each. A set that is no larger is taken as it is.
        seed: The seed of the draw, whatever the seed of a run.

    Returns:
        The set with `samples` samples in total.

    Raises:
        InvalidValue: If `of` is a part itself.
    """
    call = parse(of)
    if call.name == "part":
        raise InvalidValue("part: of must name a whole data set, not a part of one")
    dataset: Dataset = datasets.build(call)
    total = len(dataset.train) + len(dataset.test)
    if samples >= total:
        return dataset
    tests = min(max(1, round(samples * len(dataset.test) / total)), samples - 1)
    train = _drawn(dataset.train, samples - tests, seed, "train")
    return replace(dataset, train=train, test=_drawn(dataset.test, tests, seed, "test"))


def _drawn(samples: Samples, count: int, seed: int, name: str) -> Samples:
    chosen = torch.randperm(len(samples), generator=stream(seed, f"part {name}"))[:count]
    return samples[chosen.sort().values]
