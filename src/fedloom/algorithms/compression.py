"""Compressed traffic: clients send fewer bits, fewer numbers or matrices of low rank in place of the update of their model."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.algorithm import (
    Algorithm,
    AnyClient,
    Message,
    Plan,
    Replies,
    Wrapper,
    algorithms,
    describe,
    name_of,
    require_one_model,
)
from fedloom.algorithms.sharing import length
from fedloom.algorithms.stages import Stages
from fedloom.config.fields import Count, Share
from fedloom.errors import InvalidValue
from fedloom.local.cohort import Cohort
from fedloom.round import Round
from fedloom.secure.exchange import LayerExchange

Bits = Literal[1, 2, 4, 8]

Shape = tuple[int, ...]


@dataclass
class Compressed(Wrapper):
    """The base of wrappers that code what clients upload.

    A client codes its update d_i = w_i - w of the trainable parameters, with w the model that it was sent, and what is as long
    (SCAFFOLD's variate) as it is. Statistics of batch norm, which would stop being variances, travel whole, as `rest`, and
    other tensors as they are. The server gives the inner method w + decoded(d_i) for the client's model. Where a client
    `keeps_error`, it adds the error e_i that coding left to its next update: c_i = code(d_i + e_i),
    e_i <- d_i + e_i - decoded(c_i).
    """

    averages: ClassVar[bool] = False  # whatever reads the replies must be inside
    numbers: ClassVar[str] = ""  # the coded part that holds floats, which `quantised` may code once more
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  # of coded parts that are not of the model's dtype

    @abstractmethod
    def parts(self, size: int) -> dict[str, Shape]:
        """Name and shape of each part that codes `size` numbers."""

    @abstractmethod
    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        """The parts `[k, ...]` that code `rows [k, n]`; `streams` gives a random stream for each row."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Tensor], size: int) -> Tensor:
        """The rows `[k, size]` that the parts stand for."""

    @property
    def keeps_error(self) -> bool:
        """Whether clients remember what coding left out."""
        return False

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.method.nested():
            if isinstance(part, LayerExchange):
                raise InvalidValue(
                    f"{name_of(self)}: clients of {describe(part)} upload layers of each other, "
                    "which are no update of the model that they were sent"
                )
            if isinstance(part, Compressed) and (type(part) is type(self) or not isinstance(self, Quantised)):
                raise InvalidValue(f"{name_of(self)}: {describe(part)} is coded already; only quantised goes around it")

    def require_inside(self, outer: Algorithm) -> None:
        if not isinstance(outer, Compressed | Stages):
            name = name_of(outer)
            hint = "" if isinstance(outer, LayerExchange) else f": put {name_of(self)} around {name}"
            raise InvalidValue(f"{name} needs the models themselves, which {describe(self)} sends in code{hint}")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        opening = plan.opening()
        for method in self.method.nested():
            if not isinstance(method, Compressed):
                require_one_model(name_of(self), method, opening)

    def model_length(self, round: Round) -> tuple[int, int]:
        """How many numbers of a model are coded, those that train, and how many travel."""
        unit, trainable = self.travels(AnyClient(self.layout, self.plan.module, round)), self.layout.trainable
        return sum(min(part.stop, trainable) - min(part.start, trainable) for part in unit), length(unit)

    def coded(self, shapes: Iterable[tuple[str, Shape]], round: Round) -> dict[str, int]:
        """Which tensors are coded, and how many of their numbers: of the model those that train, all of what is as long as these,
        and the floats of an inner code."""
        if isinstance(self.method, Compressed):
            return {name: shape[0] for name, shape in shapes if name.endswith(f".{self.method.numbers}")}
        long, whole = self.layout.trainable, (self.layout.trainable,)
        return {
            name: self.model_length(round)[0] if name == "model" else long
            for name, shape in shapes
            if name == "model" or shape == whole
        }

    @property
    def reply_dtypes(self) -> Mapping[str, torch.dtype]:
        names = self.coded(self.method.expects(self.plan.opening()).items(), self.plan.opening())
        return {f"{name}.{part}": dtype for name in names for part, dtype in self.dtypes.items()}

    # --- the server half ---

    def expects(self, round: Round) -> Mapping[str, Shape]:
        expected = dict(self.method.expects(round))
        for name, size in self.coded(expected.items(), round).items():
            (total,) = expected.pop(name)
            rest = {"rest": (total - size,)} if total > size else {}
            expected |= {f"{name}.{part}": shape for part, shape in {**self.parts(size), **rest}.items()}
        return expected

    def handed_on(self, round: Round, replies: Replies) -> Replies:
        tensors = dict(replies.tensors)
        for name, size in self.coded(self.method.expects(round).items(), round).items():
            rows = self.decode({part: tensors.pop(f"{name}.{part}") for part in self.parts(size)}, size)
            rest = [tensors.pop(f"{name}.rest")] if f"{name}.rest" in tensors else []
            tensors[name] = torch.cat([rows, *rest], 1)
            if name == "model":
                sent = self.method.send(round)["model"]
                tensors[name] += sent[replies.slots.to(sent.device)] if len(sent) > 1 else sent
        return replace(replies, tensors=tensors)

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply = self.method.train(cohort, inbox)
        shapes = [(name, tuple(rows.shape[1:])) for name, rows in reply.items()]
        for name, size in self.coded(shapes, cohort.round).items():
            rows = reply.pop(name)
            if name == "model":
                rows = rows - inbox["model"]
                reply |= {"model.rest": rows[:, size:]} if rows.shape[1] > size else {}
            rows = rows[:, :size]
            kept = f"{name_of(self)}_error_{name}_{size}"
            if self.keeps_error:
                rows = rows + cohort.memory.get(kept, torch.zeros_like(rows[:1]))
            parts = self.encode(rows, lambda name=name: cohort.stream(f"{name_of(self)}/{name}"))  # type: ignore[misc]
            if self.keeps_error:
                cohort.memory.write(kept, rows - self.decode(parts, size), cohort.uploads)
            reply |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        return reply


@algorithms.register("quantised")
@dataclass
class Quantised(Compressed):
    """Quantisation: every number of an update takes `bits` bits, and what the server sends `down` bits.

    Of each `bucket` consecutive numbers the smallest and the largest, a and b, travel in full, and each x as the level
    l of 2^bits - 1 steps: with s = (b - a) / (2^bits - 1), l = floor((x - a) / s + u), decoded a + l s. `stochastic` draws u
    uniformly from [0, 1), so that E[decoded] = x; otherwise u = 1/2, the nearest level. Levels are packed into bytes; n numbers
    take ceil(n bits / 8) bytes and 2 floats for each bucket.

    `down` codes the model that is sent by nearest levels, and a variate with it. The server keeps the exact model and adds the
    clients' updates to it, so the error of a download does not add up. `bits=none` codes the download alone. Around `sparse`
    and `lowrank` it codes their values: `quantised(sparse(fedavg), bits=8, down=8)`. Models for evaluation are sent whole.
    Source: Suresh et al. 2017, "Distributed mean estimation with limited communication", section 2.2, in buckets as QSGD
    (Alistarh et al. 2017); Reisizadeh et al. 2020 (FedPAQ).
    Use it when traffic is scarce: 8 bits cost no accuracy, fewer bits need more clients in a round, over whom the
    errors of rounding average out.
    """

    bits: Bits | None = 8
    stochastic: bool = True
    down: Bits | None = None
    bucket: Count = 1024

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"levels": torch.uint8}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is None and self.down is None:
            raise InvalidValue("quantised: bits=none codes the download alone: give it down=8")

    def coded(self, shapes: Iterable[tuple[str, Shape]], round: Round) -> dict[str, int]:
        found = super().coded(shapes, round)
        return found if self.bits else {name: size for name, size in found.items() if name == "model"}

    def parts(self, size: int) -> dict[str, Shape]:
        if self.bits is None:
            return {"update": (size,)}
        return {"levels": (math.ceil(size * self.bits / 8),), "scales": (math.ceil(size / self.bucket), 2)}

    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        if self.bits is None:
            return {"update": rows}
        drawn = None
        if self.stochastic:
            drawn = torch.stack([torch.rand(rows.shape[1], generator=stream) for stream in streams()]).to(rows)
        levels, scales = quantise(rows, self.bits, self.bucket, drawn)
        return {"levels": levels, "scales": scales}

    def decode(self, parts: Mapping[str, Tensor], size: int) -> Tensor:
        if self.bits is None:
            return parts["update"].clone()
        return dequantise(parts["levels"], parts["scales"], size, self.bits, self.bucket)

    def send(self, round: Round) -> Message:
        message = self.method.send(round)
        if self.down is None:
            return message
        trainable = self.layout.trainable
        for name in [name for name, rows in message.items() if name == "model" or rows.shape[1:] == (trainable,)]:
            rows, size = message.pop(name), self.model_length(round)[0] if name == "model" else trainable
            levels, scales = quantise(rows[:, :size], self.down, self.bucket, None)
            message |= {f"{name}.levels": levels, f"{name}.scales": scales}
            message |= {f"{name}.rest": rows[:, size:]} if rows.shape[1] > size else {}
        return message

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        if self.down is not None:
            inbox = dict(inbox)
            for name in [name.removesuffix(".levels") for name in inbox if name.endswith(".levels")]:
                size = self.model_length(cohort.round)[0] if name == "model" else self.layout.trainable
                levels, scales = inbox.pop(f"{name}.levels"), inbox.pop(f"{name}.scales")
                rest = [inbox.pop(f"{name}.rest")] if f"{name}.rest" in inbox else []
                inbox[name] = torch.cat([dequantise(levels, scales, size, self.down, self.bucket), *rest], 1)
        return super().train(cohort, inbox)


@algorithms.register("sparse")
@dataclass
class Sparse(Compressed):
    """Sparse updates: a client sends the numbers of its update that are largest in magnitude, a `share` of all.

    Of n numbers max(1, floor(share n)) travel as 32-bit indices, in ascending order, and values; the others count as zero. With
    `feedback` what was left out is kept and added to the client's next update, so that nothing is lost; without, small numbers
    never arrive.
    Source: Aji and Heafield 2017 (gradient dropping); Stich et al. 2018, "Sparsified SGD with memory", algorithm 1.
    Use it when uploads are what costs and clients take part often: an update that is kept back for long is stale.
    """

    share: Share = 0.01
    feedback: bool = True

    numbers: ClassVar[str] = "values"
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"indices": torch.int32}

    @property
    def keeps_error(self) -> bool:
        return self.feedback

    def parts(self, size: int) -> dict[str, Shape]:
        kept = max(1, int(self.share * size + 1e-9))
        return {"indices": (kept,), "values": (kept,)}

    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        kept = self.parts(rows.shape[1])["values"][0]
        indices = rows.abs().topk(kept, sorted=False).indices.sort().values
        return {"indices": indices.to(torch.int32), "values": rows.gather(1, indices)}

    def decode(self, parts: Mapping[str, Tensor], size: int) -> Tensor:
        indices, values = parts["indices"].long(), parts["values"]
        inside = (indices >= 0) & (indices < size)  # what a hostile site names beyond that counts as nothing
        rows = values.new_zeros(len(values), size)
        return rows.scatter_add_(1, indices.clamp(0, size - 1), values * inside)


class Matrix(NamedTuple):
    """A tensor of the model as a matrix `[high, wide]`, from `start` on in a row; of `rank` where that saves numbers, else 0."""

    start: int
    high: int
    wide: int
    rank: int

    @property
    def sent(self) -> int:
        """Numbers that travel."""
        return self.rank * (self.high + self.wide) or self.high * self.wide


@algorithms.register("lowrank")
@dataclass
class LowRank(Compressed):
    """Updates of low rank: each matrix M [m, n] of an update travels as P [m, r] and Q [n, r], decoded as P Q^T.

    A convolution's weight is the matrix of its output channels by all else. From a random Q: P = orthonormal(M Q), Q = M^T P, and
    both once more, which is near the best approximation of that rank. Vectors, and matrices with r (m + n) >= m n, travel in
    full. With `feedback` what the approximation leaves out is added to the client's next update.
    Source: Vogels et al. 2019, "PowerSGD", algorithm 1, with a second step of the power iteration in place of a warm start, since
    clients take part now and then; Konecny et al. 2016 (structured updates).
    Use it for models with large linear layers, whose updates are nearly of low rank.
    """

    rank: Count = 4
    feedback: bool = True

    numbers: ClassVar[str] = "factors"

    @property
    def keeps_error(self) -> bool:
        return self.feedback

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        expected = self.method.expects(plan.opening())
        if expected.get("model") != (plan.layout.size,):
            raise InvalidValue(f"lowrank: clients of {describe(self.method)} do not return whole models")

    def matrices(self, size: int) -> list[Matrix]:
        """The tensors in the first `size` numbers of a row."""
        found = []
        for part in self.layout.slices:
            if part.stop <= size:
                high = part.shape[0] if len(part.shape) > 1 else 1
                wide = (part.stop - part.start) // max(1, high)
                saves = self.rank * (high + wide) < high * wide
                found.append(Matrix(part.start, high, wide, self.rank if saves else 0))
        return found

    def parts(self, size: int) -> dict[str, Shape]:
        return {"factors": (sum(matrix.sent for matrix in self.matrices(size)),)}

    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        factors, generators = [], streams()
        for start, high, wide, rank in self.matrices(rows.shape[1]):
            matrix = rows[:, start : start + high * wide].reshape(len(rows), high, wide)
            if rank:
                right = torch.stack([torch.randn(wide, rank, generator=one) for one in generators]).to(rows)
                left, right = low_rank(matrix, right)
                factors += [left.flatten(1), right.flatten(1)]
            else:
                factors.append(matrix.flatten(1))
        return {"factors": torch.cat(factors, 1)}

    def decode(self, parts: Mapping[str, Tensor], size: int) -> Tensor:
        factors, found, place = parts["factors"], [], 0
        for matrix in self.matrices(size):
            held = factors[:, place : place + matrix.sent]
            if matrix.rank:
                left, right = held.split([matrix.high * matrix.rank, matrix.wide * matrix.rank], 1)
                left = left.reshape(-1, matrix.high, matrix.rank)
                held = (left @ right.reshape(-1, matrix.wide, matrix.rank).mT).flatten(1)
            found.append(held)
            place += matrix.sent
        return torch.cat(found, 1)


def quantise(rows: Tensor, bits: int, bucket: int, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """The packed levels `[k, ceil(n bits / 8)]` (uint8) of `rows [k, n]`, and the smallest and largest number of each bucket,
    `[k, ceil(n / bucket), 2]`. `drawn [k, n]` in [0, 1) rounds at random; None to the nearest level."""
    size = rows.shape[1]
    padded = torch.cat([rows, rows[:, -1:].expand(-1, -size % bucket)], 1).unflatten(1, (-1, bucket))
    scales = torch.stack(torch.aminmax(padded, dim=2), 2)
    low, step = scales[..., :1], (scales[..., 1:] - scales[..., :1]) / (2**bits - 1)
    levels = ((padded - low) / torch.where(step == 0, 1, step)).flatten(1)[:, :size]
    levels = (levels + (0.5 if drawn is None else drawn)).floor().clamp(0, 2**bits - 1).to(torch.uint8)
    in_byte = 8 // bits
    places = bits * torch.arange(in_byte, device=rows.device)
    together = F.pad(levels, (0, -size % in_byte)).unflatten(1, (-1, in_byte))
    return (together.int() << places).sum(2).to(torch.uint8), scales


def dequantise(levels: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """The rows `[k, size]` that `quantise` has coded: level l of a bucket is a + l (b - a) / (2^bits - 1)."""
    places = bits * torch.arange(8 // bits, device=levels.device)
    numbers = (levels.int().unsqueeze(2) >> places & 2**bits - 1).flatten(1)[:, :size].to(scales)
    spread = F.pad(numbers, (0, -size % bucket)).unflatten(1, (-1, bucket))
    low, step = scales[..., :1], (scales[..., 1:] - scales[..., :1]) / (2**bits - 1)
    rows: Tensor = (low + spread * step).flatten(1)[:, :size]
    return rows


def low_rank(matrix: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """P `[k, m, r]` with orthonormal columns and Q `[k, n, r]` such that P Q^T is near `matrix [k, m, n]`: two steps of the power
    iteration from `start [k, n, r]`."""
    left = torch.linalg.qr(matrix @ start).Q
    left = torch.linalg.qr(matrix @ (matrix.mT @ left)).Q
    return left, matrix.mT @ left
