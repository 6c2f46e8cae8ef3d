"""Synthetic classification data of users that differ in their model (alpha) and in their inputs
(beta).
"""

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import Count, NonNegative
from fedloom.common.randomness import numpy_stream
from fedloom.data.dataset import Dataset, Samples, datasets, hold_out
from fedloom.data.formats.limits import require_room

Floats = npt.NDArray[np.float64]
Classes = Annotated[int, Field(ge=2)]


@datasets.register("synthetic")
def synthetic(
    *,
    alpha: NonNegative = 0.0,
    beta: NonNegative = 0.0,
    users: Count = 30,
    iid: bool = False,
    test_fraction: float = 0.1,
    dimension: Count = 60,
    classes: Classes = 10,
    seed: int = 0,
) -> Dataset:
    """Synthetic(alpha, beta) of FedProx: each user has its own linear model and input
    distribution.

    User i holds int(LogNormal(4, 2)) + 50 samples. Its model: u_i ~ N(0, alpha), W_i and b_i ~
    N(u_i, 1). Its inputs: B_i ~ N(0, beta), v_i ~ N(B_i, 1) in each coordinate, x ~ N(v_i,
    diag(j^-1.2)), j = 1..dimension. Its labels: argmax(x W_i + b_i). The second figure of every N
    except the last is a standard deviation, as in the authors' code. Groups are the users.

    Args:
        alpha: The spread of the users' models, at least 0.
        beta: The spread of their inputs, at least 0.
        users: Their number.
        iid: All users share one W, b ~ N(0, 1) and v = 0; alpha and beta must be 0.
        test_fraction: The share of each user's samples that is held out, in (0, 1).
        dimension: The number of features.
        classes: The number of classes, at least 2.
        seed: The seed of the data, whatever the seed of a run.

    Returns:
        Features `[n, dimension]` float32, labels from 0, and the user of each sample.

    Raises:
        InvalidValue: For `iid` with alpha or beta above 0.

    Source: Li et al., Federated Optimization in Heterogeneous Networks, section 5.1 and appendix
    C.1.
    """
    if iid and (alpha or beta):
        raise InvalidValue(f"iid=True needs alpha=0 and beta=0, not alpha={alpha} and beta={beta}")
    # the fewest samples that users have
    require_room(_bytes(users * 50, dimension, classes), "synthetic")
    draw = numpy_stream(seed, "synthetic sizes")
    sizes = draw.lognormal(4.0, 2.0, users).astype(np.int64) + 50
    require_room(_bytes(int(sizes.sum()), dimension, classes), "synthetic")
    samples = _sample(
        sizes, None if iid else alpha, None if iid else beta, dimension, classes, seed
    )
    return Dataset(
        "synthetic", *hold_out(samples, test_fraction, seed, within=samples.groups), classes
    )


@datasets.register("synthetic_feddc")
def synthetic_feddc(
    *,
    alpha: NonNegative = 0.0,
    beta: NonNegative = 0.0,
    users: Count = 20,
    samples: Annotated[int, Field(ge=2)] = 200,
    dimension: Count = 30,
    classes: Classes = 5,
    test: Literal["held_out", "train"] = "held_out",
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Synthetic(alpha, beta) of FedDC: users with `samples` each; at 0 all users share a model, or
    the mean of inputs.

    As `synthetic`, but alpha = 0 gives every user one model W, b ~ N(0, 1), and beta = 0 gives
    every user the mean input 0. The papers' settings are (0, 0), (1, 0) and (0, 1).

    Args:
        alpha: As in `synthetic`.
        beta: As in `synthetic`.
        users: Their number.
        samples: The samples of each user, at least 2.
        dimension: The number of features.
        classes: The number of classes, at least 2.
        test: `held_out` holds out `test_fraction` of each user's samples; `train` tests on all the
            data trained on, as the authors' code does.
        test_fraction: That share, in (0, 1).
        seed: The seed of the data, whatever the seed of a run.

    Returns:
        Features `[n, dimension]` float32, labels from 0, and the user of each sample.

    Source: Gao et al., FedDC, section 4.1; FedUmf, appendix, Figure A5.
    """
    require_room(_bytes(users * samples, dimension, classes), "synthetic_feddc")
    sizes = np.full(users, samples, dtype=np.int64)
    drawn = _sample(sizes, alpha or None, beta or None, dimension, classes, seed)
    if test == "train":
        return Dataset("synthetic_feddc", drawn, drawn, classes)
    return Dataset(
        "synthetic_feddc", *hold_out(drawn, test_fraction, seed, within=drawn.groups), classes
    )


def _bytes(samples: int, dimension: int, classes: int) -> int:
    """Return the peak memory of drawing `samples`: inputs in double and in single precision, and a
    linear model.
    """
    return samples * (12 * dimension + 16) + 8 * dimension * classes


def _sample(
    sizes: npt.NDArray[np.int64],
    alpha: float | None,
    beta: float | None,
    dimension: int,
    classes: int,
    seed: int,
) -> Samples:
    """Draw the samples of users, each from its own stream; None for one model, or one mean of
    inputs, of all.
    """
    deviation = np.sqrt(np.arange(1, dimension + 1) ** -1.2)
    shared = _linear_model(numpy_stream(seed, "synthetic model"), 0.0, dimension, classes)
    inputs: list[Floats] = []
    labels: list[npt.NDArray[np.int64]] = []
    for user, size in enumerate(sizes.tolist()):
        draw = numpy_stream(seed, "synthetic user", client=user)
        model_mean = draw.normal(0.0, alpha or 0.0)
        input_mean = draw.normal(0.0, beta or 0.0)
        weight, bias = (
            shared if alpha is None else _linear_model(draw, model_mean, dimension, classes)
        )
        centre = np.zeros(dimension) if beta is None else draw.normal(input_mean, 1.0, dimension)
        # Rounded first, because labels belong to the clients' float32 inputs.
        x = (
            (centre + draw.standard_normal((size, dimension)) * deviation)
            .astype(np.float32)
            .astype(np.float64)
        )
        inputs.append(x)
        labels.append(np.argmax(x @ weight + bias, axis=1))
    groups = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))
    stacked = torch.from_numpy(np.concatenate(inputs)).to(torch.float32)
    return Samples(stacked, torch.from_numpy(np.concatenate(labels)), groups)


def _linear_model(
    draw: np.random.Generator, mean: float, dimension: int, classes: int
) -> tuple[Floats, Floats]:
    return draw.normal(mean, 1.0, (dimension, classes)), draw.normal(mean, 1.0, classes)
