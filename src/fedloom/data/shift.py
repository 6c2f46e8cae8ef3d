"""Distribution shift: inputs that differ from client to client, turned, noisy or in other colours,
as of cameras and sites.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.common.errors import InvalidValue
from fedloom.common.fields import NonNegative, Probability, require_fields
from fedloom.common.randomness import numpy_stream, stream
from fedloom.common.registry import Registry
from fedloom.data.dataset import Samples
from fedloom.data.partition import Partition
from fedloom.objectives import kind_of

_CHUNK = 1024
Angle = Annotated[float, Field(ge=-360, le=360)]


@dataclass(frozen=True)
class InputShift:
    """Changes the inputs of each client's training and own test samples; labels and the global test
    set stay.
    """

    pictures: ClassVar[bool] = False  # of pictures only

    def __post_init__(self) -> None:
        require_fields(self)

    def changed(self, inputs: Tensor, client: int, clients: int, seed: int) -> Tensor:
        """Return the shifted inputs of a client.

        Args:
            inputs: Inputs `[n, ...]`: float32 pixels between 0 and 1, or float features.
            client: Number of the client.
            clients: Number of clients.
            seed: Seed of the draws.

        Returns:
            Inputs of the same shape and type.
        """
        raise NotImplementedError

    def apply(self, samples: Samples, partition: Partition, seed: int) -> Samples:
        """Return the samples, shifted for each client.

        Args:
            samples: All samples.
            partition: Samples of each client.
            seed: Seed of the draws.

        Returns:
            New samples with the same labels and groups. Pixels are rounded to bytes again.

        Raises:
            InvalidValue: The inputs are tokens, or a shift of pictures gets other inputs.
        """
        inputs = samples.inputs
        if not (inputs.dtype == torch.uint8 or inputs.is_floating_point()):
            raise InvalidValue(f"shift needs pictures or numbers, not {kind_of(inputs)}")
        if self.pictures and inputs.dim() != 4:
            raise InvalidValue(
                f"this shift needs pictures [n, channels, height, width], not {kind_of(inputs)}"
            )
        inputs = inputs.clone()
        pixels = inputs.dtype == torch.uint8
        for client in range(len(partition)):
            # whatever the order: noise is drawn sample by sample
            rows = torch.from_numpy(np.sort(partition[client]))
            originals = inputs[rows].float().div(255) if pixels else inputs[rows]
            shifted = self.changed(originals, client, len(partition), seed)
            if pixels:
                shifted = shifted.mul(255).round().clamp(0, 255)
            inputs[rows] = shifted.to(inputs.dtype)
        return replace(samples, inputs=inputs)


shifts: Registry[type[InputShift]] = Registry("shift", "fedloom.data")


@shifts.register("rotation")
@dataclass(frozen=True)
class Rotation(InputShift):
    """Pictures of client i are turned by the angle of this client about their centre, in degrees
    counter-clockwise.

    Pixels are interpolated linearly (exact at multiples of 90 of square pictures); those from
    outside are black, the lowest value.

    Args:
        degrees: The largest angle d: angles are uniform in [-d, d]. Or a list of angles, each of
            which as many clients get as get any other, within one: `rotation([0, 90, 180, 270])`.

    Source: Ghosh et al., IFCA, NeurIPS 2020, section 6 (rotated MNIST and CIFAR).
    """

    pictures: ClassVar[bool] = True
    degrees: Angle | list[Angle] = 45.0

    def angle(self, client: int, clients: int, seed: int) -> float:
        """Return the angle of a client in degrees.

        Args:
            client: Number of the client.
            clients: Number of clients.
            seed: Seed of the draws.

        Returns:
            The angle. It stays the same in all rounds.

        Raises:
            InvalidValue: The list of angles is empty.
        """
        rng = numpy_stream(seed, "shift")
        if isinstance(self.degrees, list):
            if not self.degrees:
                raise InvalidValue("degrees must list an angle")
            return float(self.degrees[rng.permutation(clients)[client] % len(self.degrees)])
        return float(rng.uniform(-self.degrees, self.degrees, clients)[client])

    def changed(self, inputs: Tensor, client: int, clients: int, seed: int) -> Tensor:
        angle = self.angle(client, clients, seed)
        if angle % 90 == 0 and (inputs.shape[2] == inputs.shape[3] or angle % 180 == 0):
            return inputs.rot90(int(angle // 90), (2, 3))
        height, width = inputs.shape[2:]
        cosine = np.cos(np.deg2rad(angle))
        sine = np.sin(np.deg2rad(angle))
        # The origin of each pixel, in units of half the width and half the height.
        turn = torch.tensor(
            [[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0]],
            dtype=inputs.dtype,
        )
        lowest = inputs.amin() if len(inputs) else 0
        turned = []
        for chunk in inputs.split(_CHUNK):
            grid = F.affine_grid(turn.expand(len(chunk), 2, 3), list(chunk.shape), False)
            turned.append(F.grid_sample(chunk - lowest, grid, align_corners=False))
        return torch.cat(turned) + lowest


@shifts.register("noise")
@dataclass(frozen=True)
class InputNoise(InputShift):
    """Gaussian noise that grows from client to client: x + e, e ~ N(0, sigma i / N), the variance
    of client i = 1 .. N.

    Of pixels between 0 and 1, which stay there, or of features as they are.

    Args:
        sigma: The variance of client N, at least 0.

    Source: Li, Diao, Chen, He, Federated Learning on Non-IID Data Silos, ICDE 2022, section IV
    (noise-based feature skew, sigma 0.1).
    """

    sigma: NonNegative = 0.1

    def changed(self, inputs: Tensor, client: int, clients: int, seed: int) -> Tensor:
        drawn = torch.randn(
            inputs.shape, generator=stream(seed, "shift noise", client=client), dtype=inputs.dtype
        )
        return inputs + drawn * math.sqrt(self.sigma * (client + 1) / clients)


@shifts.register("colour")
@dataclass(frozen=True)
class Colour(InputShift):
    """Every channel c of client i has its own gain and offset: a_ic x + b_ic, as cameras
    and scanners differ.

    a ~ U(1 - strength, 1 + strength) and b ~ U(-strength / 2, strength / 2), of pixels between 0
    and 1, which stay there.

    Args:
        strength: In [0, 1].

    Source: the sites of FedBN (Li et al., ICLR 2021), where inputs differ in the statistics that
    batch normalisation removes; the form is that of torchvision's ColorJitter (brightness), by
    channel.
    """

    pictures: ClassVar[bool] = True
    strength: Probability = 0.3

    def changed(self, inputs: Tensor, client: int, clients: int, seed: int) -> Tensor:
        rng = numpy_stream(seed, "shift", client=client)
        drawn = torch.from_numpy(rng.uniform(-1, 1, (2, inputs.shape[1], 1, 1))).to(inputs.dtype)
        return inputs * (1 + self.strength * drawn[0]) + self.strength / 2 * drawn[1]
