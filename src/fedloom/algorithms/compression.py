"""Compressed traffic: clients code the update of their model in fewer bits, fewer numbers or matrices of low rank."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Replies, Wrapper, algorithms, name_of, require_one_model
from fedloom.algorithms.secure_recombination import Secure
from fedloom.algorithms.stages import Stages
from fedloom.config.fields import Count, Share
from fedloom.errors import InvalidValue
from fedloom.local.cohort import Cohort
from fedloom.round import Round

Bits = Literal[1, 2, 4, 8]
Shape = tuple[int, ...]


class Compressed(Wrapper):
    """Base of wrappers that code uploads.

    A client codes its update d_i = w_i - w of the trainable parameters, with w the model that it was sent, and every tensor
    of that length (SCAFFOLD's variate). Batch-norm statistics, which would stop being variances, travel in full as `rest`, and
    other tensors unchanged. The server gives the inner method w + decoded(d_i) for the client's model. With `feedback` a
    client adds the coding error e_i to its next update: c_i = code(d_i + e_i), e_i <- d_i + e_i - decoded(c_i).
    """

    averages: ClassVar[bool] = False  # a wrapper that reads the replies must be inside
    numbers: ClassVar[str] = ""  # the tensor of floats in the code, which `quantised` may code again
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  # of tensors in the code that differ from the model's dtype

    @abstractmethod
    def code_shapes(self, size: int) -> dict[str, Shape]:
        """Return name and shape of each tensor of the code of `size` numbers."""

    @abstractmethod
    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        """Return the code, tensors `[k, ...]`, of `rows [k, n]`; `streams` gives a random stream for each row."""

    @abstractmethod
    def decode(self, code: Mapping[str, Tensor], size: int) -> Tensor:
        """Return the rows `[k, size]` of a code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for inner in self.method.nested():
            if isinstance(inner, Secure):
                raise InvalidValue(f"{name_of(self)}: clients of {inner} upload layers of each other, no updates")
            if isinstance(inner, Compressed) and (type(inner) is type(self) or not isinstance(self, Quantised)):
                raise InvalidValue(f"{name_of(self)}: {inner} is coded already; only quantised goes around it")

    def require_inside(self, outer: Algorithm) -> None:
        if not isinstance(outer, Compressed | Stages):
            name = name_of(outer)
            hint = "" if isinstance(outer, Secure) else f": put {name_of(self)} around {name}"
            raise InvalidValue(f"{name} needs the models themselves, which {self} sends in code{hint}")

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        opening = plan.opening()
        for method in self.method.nested():
            if not isinstance(method, Compressed):
                require_one_model(name_of(self), method, opening)

    def size(self, name: str, round: Round) -> int:
        """Return how many numbers of a tensor are coded: the trainable ones, of the model those that travel."""
        trainable = self.layout.trainable
        if name != "model":
            return trainable
        ends = ((min(columns.start, trainable), min(columns.stop, trainable)) for columns in self.travelling(round))
        return sum(stop - start for start, stop in ends)

    def updates(self, shapes: Mapping[str, Shape], round: Round) -> dict[str, int]:
        """Return the tensors that are an update of the model or as long as one, and how many of their numbers are coded."""
        trainable = (self.layout.trainable,)
        return {n: self.size(n, round) for n, shape in shapes.items() if n == "model" or shape == trainable}

    def coded(self, shapes: Mapping[str, Shape], round: Round) -> dict[str, int]:
        """Return the tensors of a reply that are coded, and how many of their numbers: of an inner code, its floats."""
        if isinstance(self.method, Compressed):
            return {name: shape[0] for name, shape in shapes.items() if name.endswith(f".{self.method.numbers}")}
        return self.updates(shapes, round)

    @property
    def reply_dtypes(self) -> Mapping[str, torch.dtype]:
        opening = self.plan.opening()
        names = self.coded(self.method.expects(opening), opening)
        return {**super().reply_dtypes, **{f"{n}.{key}": dtype for n in names for key, dtype in self.dtypes.items()}}

    # --- the server half ---

    def expects(self, round: Round) -> Mapping[str, Shape]:
        expected = dict(self.method.expects(round))
        for name, size in self.coded(expected, round).items():
            (total,) = expected.pop(name)
            uncoded = {"rest": (total - size,)} if total > size else {}
            expected |= {f"{name}.{key}": shape for key, shape in {**self.code_shapes(size), **uncoded}.items()}
        return expected

    def incoming(self, round: Round, replies: Replies) -> Replies:
        if not len(replies):
            return replies.inward()
        inner = replies.inward(self._updates(round, replies.matrices))
        if "model" in self.coded(self.method.expects(round), round):
            inner.matrices["model"] += inner.sent_by_slot("model")
        return inner

    def decoded(self, round: Round, tensors: Message) -> Message:
        return self.method.decoded(round, self._updates(round, tensors))

    def _updates(self, round: Round, message: Message) -> Message:
        """Decode `message`: with an update in place of the model."""
        tensors = dict(message)
        for name, size in self.coded(self.method.expects(round), round).items():
            rows = self.decode({key: tensors.pop(f"{name}.{key}") for key in self.code_shapes(size)}, size)
            tensors[name] = with_rest(tensors, name, rows)
        return tensors

    # --- the client half ---

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        reply, feedback = self.method.train(cohort, inbox), getattr(self, "feedback", False)
        shapes = {name: tuple(rows.shape[1:]) for name, rows in reply.items()}
        for name, size in self.coded(shapes, cohort.round).items():
            rows = reply.pop(name)
            if name == "model":
                rows = rows - inbox["model"]
            coded, error_name = rows[:, :size], f"{name_of(self)}_error_{name}_{size}"
            if feedback:
                coded = coded + cohort.memory.get(error_name, torch.zeros_like(coded[:1]))
            code = self.encode(coded, partial(cohort.stream, f"{name_of(self)}/{name}"))
            if feedback:
                cohort.memory.write(error_name, coded - self.decode(code, size), cohort.uploads)
            reply |= packed(name, rows, size, code)
        return reply


def packed(name: str, rows: Tensor, size: int, code: Mapping[str, Tensor]) -> Message:
    """Return the code of the first `size` numbers of `rows`, named after the tensor, with the other numbers as `rest`."""
    uncoded = {"rest": rows[:, size:]} if rows.shape[1] > size else {}
    return {f"{name}.{key}": tensor for key, tensor in {**code, **uncoded}.items()}


def with_rest(message: Message, name: str, rows: Tensor) -> Tensor:
    """Return decoded `rows` beside the tensor's other numbers, which are removed from the message."""
    return torch.cat([rows, message.pop(f"{name}.rest")], 1) if f"{name}.rest" in message else rows


@algorithms.register("quantised")
class Quantised(Compressed):
    """Quantisation: every number of an update takes `bits` bits, and what the server sends `down` bits.

    Of each `bucket` consecutive numbers the smallest and the largest, a and b, travel in full, and each x as the level
    l of 2^bits - 1 steps: with s = (b - a) / (2^bits - 1), l = floor((x - a) / s + u), decoded a + l s. Levels are packed into
    bytes; n numbers take ceil(n bits / 8) bytes and 2 floats for each bucket. `down` codes the model that is sent, and a
    variate with it, by nearest levels; the server adds updates to the exact model, so errors of downloads do not add up.
    Around `sparse` and `lowrank` it codes their values: `quantised(sparse(fedavg), bits=8, down=8)`. Models for evaluation
    are sent in full.
    Source: Suresh et al. 2017, "Distributed mean estimation with limited communication", section 2.2, in buckets as QSGD
    (Alistarh et al. 2017); Reisizadeh et al. 2020 (FedPAQ).
    Use it when traffic is scarce: 8 bits cost no accuracy; fewer need more clients in a round, over whom errors average out.

    Args:
        bits: Bits of a number in an upload.
        stochastic: Draw u uniformly from [0, 1), so that E[decoded] = x; otherwise u = 1/2, the nearest level.
        down: Bits of a number in a download; none sends it in full.
        bucket: Numbers that share a scale.
    """

    bits: Bits = 8
    stochastic: bool = True
    down: Bits | None = None
    bucket: Annotated[int, Field(ge=1, le=1_000_000)] = 1024

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"levels": torch.uint8}

    def code_shapes(self, size: int) -> dict[str, Shape]:
        return {"levels": (math.ceil(size * self.bits / 8),), "scales": (math.ceil(size / self.bucket), 2)}

    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        drawn = None
        if self.stochastic:
            drawn = torch.stack([torch.rand(rows.shape[1], generator=stream) for stream in streams()]).to(rows)
        levels, scales = quantise(rows, self.bits, self.bucket, drawn)
        return {"levels": levels, "scales": scales}

    def decode(self, code: Mapping[str, Tensor], size: int) -> Tensor:
        return dequantise(code["levels"], code["scales"], size, self.bits, self.bucket)

    def outgoing(self, round: Round, message: Message) -> Message:
        if self.down is None:
            return message
        for name, size in self.updates({name: rows.shape[1:] for name, rows in message.items()}, round).items():
            rows = message.pop(name)
            levels, scales = quantise(rows[:, :size], self.down, self.bucket, None)
            message |= packed(name, rows, size, {"levels": levels, "scales": scales})
        return message

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        if self.down is not None:
            inbox = dict(inbox)
            for name in [name.removesuffix(".levels") for name in inbox if name.endswith(".levels")]:
                levels, scales = inbox.pop(f"{name}.levels"), inbox.pop(f"{name}.scales")
                rows = dequantise(levels, scales, self.size(name, cohort.round), self.down, self.bucket)
                inbox[name] = with_rest(inbox, name, rows)
        return super().train(cohort, inbox)


@algorithms.register("sparse")
class Sparse(Compressed):
    """Sparse updates: a client sends the numbers of its update that are largest in magnitude, a `share` of all.

    Of n numbers max(1, floor(share n)) travel as 32-bit indices, in ascending order, and values; the others count as zero.
    Source: Aji and Heafield 2017 (gradient dropping); Stich et al. 2018, "Sparsified SGD with memory", algorithm 1.
    Use it when uploads are expensive and clients take part often: an old error is stale when it is sent.

    Args:
        share: Share of the numbers that travel (Aji and Heafield: 0.01).
        feedback: Add what was left out to the client's next update; otherwise small numbers never arrive.
    """

    share: Share = 0.01
    feedback: bool = True

    numbers: ClassVar[str] = "values"
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"indices": torch.int32}

    def code_shapes(self, size: int) -> dict[str, Shape]:
        count = max(1, int(self.share * size + 1e-9))
        return {"indices": (count,), "values": (count,)}

    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        count = self.code_shapes(rows.shape[1])["values"][0]
        indices = rows.abs().topk(count, sorted=False).indices.sort().values
        return {"indices": indices.to(torch.int32), "values": rows.gather(1, indices)}

    def decode(self, code: Mapping[str, Tensor], size: int) -> Tensor:
        indices, values = code["indices"].long(), code["values"]
        inside = (indices >= 0) & (indices < size)  # a hostile site's other indices count as nothing
        rows = values.new_zeros(len(values), size)
        return rows.scatter_add_(1, indices.clamp(0, size - 1), values * inside)


@algorithms.register("lowrank")
class LowRank(Compressed):
    """Updates of low rank: each matrix M [m, n] of an update travels as P [m, r] and Q [n, r], decoded as P Q^T.

    A convolution's weight is the matrix of its output channels by all else. From a random Q: P = orthonormal(M Q), Q = M^T P,
    and both once more, which is near the best approximation of that rank. Vectors, and matrices with r (m + n) >= m n, travel
    in full. Source: Vogels et al. 2019, "PowerSGD", algorithm 1, with a second step of the power iteration in place of a warm
    start, since clients take part now and then; Konecny et al. 2016 (structured updates).
    Use it for models with large linear layers, whose updates are nearly of low rank.

    Args:
        rank: r (Vogels et al.: 1 to 4).
        feedback: Add what the approximation leaves out to the client's next update.
    """

    rank: Count = 4
    feedback: bool = True

    numbers: ClassVar[str] = "factors"

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        if self.method.expects(plan.opening()).get("model") != (plan.layout.size,):
            raise InvalidValue(f"lowrank: clients of {self.method} do not return whole models")

    def matrices(self, size: int) -> Iterator[tuple[slice, int, int, int]]:
        """Yield columns, height and width of each tensor in the first `size` columns of a row, and how many numbers travel."""
        for tensor in self.layout.slices:
            if tensor.stop <= size:
                height = tensor.shape[0] if len(tensor.shape) > 1 else 1
                width = (tensor.stop - tensor.start) // max(1, height)
                yield tensor.slice, height, width, min(self.rank * (height + width), height * width)

    def code_shapes(self, size: int) -> dict[str, Shape]:
        return {"factors": (sum(sent for *_, sent in self.matrices(size)),)}

    def encode(self, rows: Tensor, streams: Callable[[], list[torch.Generator]]) -> dict[str, Tensor]:
        factors, generators = [], streams()
        for columns, height, width, sent in self.matrices(rows.shape[1]):
            if sent == height * width:
                factors.append(rows[:, columns])
                continue
            start = torch.stack([torch.randn(width, self.rank, generator=stream) for stream in generators])
            basis, factor = low_rank(rows[:, columns].reshape(-1, height, width), start.to(rows))
            factors += [basis.flatten(1), factor.flatten(1)]
        return {"factors": torch.cat(factors, 1)}

    def decode(self, code: Mapping[str, Tensor], size: int) -> Tensor:
        rows, begin = [], 0
        for _, height, width, sent in self.matrices(size):
            values, begin = code["factors"][:, begin : begin + sent], begin + sent
            if sent < height * width:
                basis, factor = values.split([height * self.rank, width * self.rank], 1)
                values = (basis.unflatten(1, (height, -1)) @ factor.unflatten(1, (width, -1)).mT).flatten(1)
            rows.append(values)
        return torch.cat(rows, 1)


def quantise(rows: Tensor, bits: int, bucket: int, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the levels of `rows [k, n]`, packed `[k, ceil(n bits / 8)]` (uint8), and the smallest and largest number of each
    bucket, `[k, ceil(n / bucket), 2]`. `drawn [k, n]` in [0, 1) rounds at random; None rounds to the nearest level."""
    size = rows.shape[1]
    padded = torch.cat([rows, rows[:, -1:].expand(-1, -size % bucket)], 1).unflatten(1, (-1, bucket))
    scales = torch.stack(torch.aminmax(padded, dim=2), 2)
    low, step = scales[..., :1], (scales[..., 1:] - scales[..., :1]) / (2**bits - 1)
    levels = ((padded - low) / torch.where(step == 0, 1, step)).flatten(1)[:, :size]
    levels = (levels + (0.5 if drawn is None else drawn)).floor().clamp(0, 2**bits - 1).to(torch.uint8)
    in_byte = 8 // bits
    shifts = bits * torch.arange(in_byte, device=rows.device)
    grouped = F.pad(levels, (0, -size % in_byte)).unflatten(1, (-1, in_byte))
    return (grouped.int() << shifts).sum(2).to(torch.uint8), scales


def dequantise(levels: Tensor, scales: Tensor, size: int, bits: int, bucket: int) -> Tensor:
    """Return the rows `[k, size]` of a code of `quantise`: level l of a bucket is a + l (b - a) / (2^bits - 1)."""
    shifts = bits * torch.arange(8 // bits, device=levels.device)
    numbers = (levels.int().unsqueeze(2) >> shifts & 2**bits - 1).flatten(1)[:, :size].to(scales)
    spread = F.pad(numbers, (0, -size % bucket)).unflatten(1, (-1, bucket))
    low, step = scales[..., :1], (scales[..., 1:] - scales[..., :1]) / (2**bits - 1)
    rows: Tensor = (low + spread * step).flatten(1)[:, :size]
    return rows


def low_rank(matrix: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return P `[k, m, r]`, orthonormal, and Q `[k, n, r]`, P Q^T near `matrix`, by two steps of power iteration from `start`."""
    basis = torch.linalg.qr(matrix @ start).Q
    basis = torch.linalg.qr(matrix @ (matrix.mT @ basis)).Q
    return basis, matrix.mT @ basis
