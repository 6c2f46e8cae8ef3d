import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.algorithm.method import algorithms
from fedloom.algorithm.records import Message
from fedloom.common.round import Round
from fedloom.flat.layout import Layout
from fedloom.parts.codec import Codec, Streams, packed, update_sizes, with_rest
from fedloom.parts.hooks import Inner, shared_trainable

Bits = Literal[1, 2, 4, 8]


@algorithms.register("quantised")
class Quantised(Codec):
    """Quantisation: every number of an update takes `bits` bits, and every number of a download
    `down` bits.

    Of each `bucket` consecutive numbers the smallest and the largest, a and b, travel in full, and
    each x as the level l of 2^bits - 1 steps: with s = (b - a) / (2^bits - 1), l = floor((x - a) /
    s + u), decoded a + l s. Levels are packed into bytes; n numbers take ceil(n bits / 8) bytes and
    2 floats for each bucket. `down` codes the downloaded model, and a variate with it, by nearest
    levels; the server adds updates to the exact model, so errors of downloads do not add up. Around
    `sparse` and `lowrank` it codes their values: `quantised(sparse(fedavg), bits=8, down=8)`.
    Models for evaluation travel in full.
    Source: Suresh et al. 2017, "Distributed mean estimation with limited communication", section
    2.2, in buckets as QSGD (Alistarh et al. 2017); Reisizadeh et al. 2020 (FedPAQ).
    Use it when traffic must be small: 8 bits cost no accuracy; fewer bits need more clients in a
    round, so that their errors average out.

    Args:
        bits: Bits of a number in an upload.
        stochastic: Draw u uniformly from [0, 1), so that E[decoded] = x; otherwise u = 1/2, the
            nearest level.
        down: Bits of a number in a download; none sends it in full.
        bucket: Number of consecutive numbers with a common scale.
    """

    bits: Bits = 8
    stochastic: bool = True
    down: Bits | None = None
    bucket: Annotated[int, Field(ge=1, le=1_000_000)] = 1024

    recodes: ClassVar[bool] = True
    code_types: ClassVar[Mapping[str, torch.dtype]] = {"levels": torch.uint8}

    def code_shapes(self, size: int, layout: Layout) -> dict[str, tuple[int, ...]]:
        return {
            "levels": (math.ceil(size * self.bits / 8),),
            "scales": (math.ceil(size / self.bucket), 2),
        }

    def encode_rows(self, rows: Tensor, streams: Streams, layout: Layout) -> dict[str, Tensor]:
        drawn = None
        if self.stochastic:
            size = rows.shape[1]
            draws = [torch.rand(size, generator=stream) for stream in streams()]
            drawn = torch.stack(draws).to(rows)
        levels, scales = quantise(rows, self.bits, self.bucket, drawn)
        return {"levels": levels, "scales": scales}

    def decode_rows(self, code: Mapping[str, Tensor], size: int, layout: Layout) -> Tensor:
        return dequantise(code["levels"], code["scales"], size, self.bits, self.bucket)

    def hooks(self) -> frozenset[str]:
        hooks = super().hooks()
        return hooks if self.down else hooks - {"encode_down", "decode_down"}

    def encode_down(self, round: Round, message: Message, inner: Inner) -> Message:
        assert self.down is not None
        coded = dict(message)
        shapes = {name: tuple(rows.shape[1:]) for name, rows in message.items()}
        for name, size in update_sizes(shapes, inner).items():
            rows = coded.pop(name)
            levels, scales = quantise(rows[:, :size], self.down, self.bucket, None)
            coded |= packed(name, rows, size, {"levels": levels, "scales": scales})
        return coded

    def decode_down(self, round: Round, inbox: Message, inner: Inner) -> Message:
        assert self.down is not None
        decoded = dict(inbox)
        trainable = inner.algorithm.plan.layout.trainable
        for coded_name in inbox:
            if not coded_name.endswith(".levels"):
                continue
            name = coded_name.removesuffix(".levels")
            size = shared_trainable(inner) if name == "model" else trainable
            levels = decoded.pop(f"{name}.levels")
            scales = decoded.pop(f"{name}.scales")
            rows = dequantise(levels, scales, size, self.down, self.bucket)
            decoded[name] = with_rest(decoded, name, rows)
        return decoded


def quantise(rows: Tensor, bits: int, bucket: int, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantise rows.

    Args:
        rows: Rows, `[k, n]`.
        bits: Bits of a number.
        bucket: Number of consecutive numbers with a common scale.
        drawn: Numbers in [0, 1) for random rounding, `[k, n]`; None rounds to the nearest level.

    Returns:
        Packed levels, `[k, ceil(n bits / 8)]` uint8, and the smallest and largest number of each
        bucket, `[k, ceil(n / bucket), 2]`.
    """
    size = rows.shape[1]
    highest = 2**bits - 1
    padding = rows[:, -1:].expand(-1, -size % bucket)
    buckets = torch.cat([rows, padding], 1).unflatten(1, (-1, bucket))
    scales = torch.stack(torch.aminmax(buckets, dim=2), 2)
    low, step = steps(scales, bits)
    nonzero = torch.where(step == 0, 1, step)
    exact = ((buckets - low) / nonzero).flatten(1)[:, :size]
    rounding = 0.5 if drawn is None else drawn
    levels = (exact + rounding).floor().clamp(0, highest).to(torch.uint8)
    in_byte = 8 // bits
    shifts = bits * torch.arange(in_byte, device=rows.device)
    grouped = F.pad(levels, (0, -size % in_byte)).unflatten(1, (-1, in_byte))
    return (grouped.int() << shifts).sum(2).to(torch.uint8), scales


def dequantise(levels: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """Decode a code of `quantise`: level l of a bucket is a + l (b - a) / (2^bits - 1).

    Args:
        levels: Packed levels, `[k, ceil(n bits / 8)]` uint8.
        scales: Smallest and largest number of each bucket, `[k, ceil(n / bucket), 2]`.
        size: Number of columns n.
        bits: Bits of a number.
        bucket: Number of consecutive numbers with a common scale.

    Returns:
        The rows, `[k, n]`.
    """
    shifts = bits * torch.arange(8 // bits, device=levels.device)
    unpacked = levels.int().unsqueeze(2) >> shifts & 2**bits - 1
    numbers = unpacked.flatten(1)[:, :size].to(scales)
    buckets = F.pad(numbers, (0, -size % bucket)).unflatten(1, (-1, bucket))
    low, step = steps(scales, bits)
    rows: Tensor = (low + buckets * step).flatten(1)[:, :size]
    return rows


def steps(scales: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the smallest number of each bucket and the distance of its levels.

    Args:
        scales: Smallest and largest number of each bucket, `[k, ceil(n / bucket), 2]`.
        bits: Bits of a number.

    Returns:
        a and (b - a) / (2^bits - 1), `[k, ceil(n / bucket), 1]` each.
    """
    low = scales[..., :1]
    high = scales[..., 1:]
    return low, (high - low) / (2**bits - 1)
