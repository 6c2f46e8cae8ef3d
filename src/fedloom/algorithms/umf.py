"""FedUmf: clients that were not selected train all the same, and bring that work along when they are."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.algorithm import Algorithm, Message, Plan, Selection, Wrapper, algorithms, describe, server_model
from fedloom.config.fields import Probability
from fedloom.errors import InvalidValue
from fedloom.local.cohort import Cohort
from fedloom.round import Round
from fedloom.state.store import Memory

NEVER = -1


@algorithms.register("umf")
@dataclass
class Umf(Wrapper):
    """FedUmf (unauthorised model fusion) over any method: idle clients train too, and fuse their last update when selected.

    Every client receives each round's model w_t. One that is selected now but was idle in the round before starts from
    w_t + alpha (eta_t / eta_{t-1}) g_i, every other client from w_t; all train, and g_i <- trained - start is overwritten in
    each round. Only selected clients upload. `umf(fedavg(weighted=false))` is the paper's FedUmf; with `umf(fedavg)` uploads
    weigh by samples. alpha = 0 and full participation give the inner method.

    g_i is over the trainable parameters and is forgotten when a client missed the round before. It moves the start alone:
    proximal terms, drifts and the like keep the model that was sent for their centre. What the inner method has clients
    remember is left as it was on the idle, whose work the server never sees. Where a method sends each client a model of
    its own (FedMR, Indep, FedMut), the idle are sent the global model, and g_i is fused into whatever slot comes next.

    A simulation trains just those idle clients that the next round selects, where that is known ahead: nobody else's g_i is
    ever read, so the numbers are the same; `simulate_all=true` trains all. Bytes down are counted once for each of the N
    clients (a broadcast medium carries that message once: divide by N). Source: FedUmf (Mathematics 2022), algorithm 1.
    Use it when few clients take part in a round, all can listen, and local computing is cheaper than traffic.
    """

    alpha: Probability = 1.0
    simulate_all: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(method, Umf) for method in self.method.nested()):
            raise InvalidValue(f"umf({describe(self.method)}): idle clients cannot fuse their updates twice")

    @property
    def anonymous_replies(self) -> bool:
        return self.method.anonymous_replies

    def setup(self, plan: Plan) -> None:
        super().setup(plan)
        for method in self.method.nested():
            _require_one_start(method, plan)

    @property
    def needs_total_rounds(self) -> bool:
        return not self._trains_all or super().needs_total_rounds  # else nobody trains idly in the last round

    @property
    def _trains_all(self) -> bool:
        """Whether all idle clients train, not those alone that the next round selects."""
        return self.simulate_all or not self.method.foreseeable

    def select(self, round: Round) -> Selection:
        chosen = self.method.select(round)
        if self._trains_all:
            wanted: tuple[int, ...] = tuple(range(round.clients))
        elif round.number < round.rounds:
            wanted = self.method.select(round.at(round.number + 1)).clients
        else:
            wanted = ()
        busy = set(chosen.clients)
        idle = tuple(client for client in wanted if client not in busy)
        return replace(chosen, idle=idle, receivers=round.clients)

    def send(self, round: Round) -> Message:
        message = self.method.send(round)
        if len(message["model"]) > 1:
            rows = self.plan.empty_rows(len(message["model"]) + 1)
            message["model"] = torch.cat([message["model"], self.method.model().unsqueeze(0)], out=rows)
        return message

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        sent, trainable = inbox["model"], cohort.layout.trainable
        idle, number = ~cohort.uploads, cohort.round.number
        update = cohort.memory.get("umf_update", sent.new_zeros(1, trainable))
        written = cohort.memory.get("umf_round", torch.full((1,), NEVER))
        fuses = (written.cpu() == number - 1) & ~idle
        ratio = cohort.round.rate_change
        start = sent.clone()
        start[:, :trainable] += update.mul(self.alpha * ratio).mul_(fuses.to(update).unsqueeze(1))
        apart = copy.copy(cohort)
        apart.memory = UploadersMemory(cohort.memory, cohort.uploads)
        reply = self.method.train(apart, {**inbox, "model": start, "server_model": server_model(inbox)})
        update = reply["model"][:, :trainable] - start[:, :trainable]
        usable = idle & torch.isfinite(update.sum(1)).cpu()
        cohort.memory["umf_update"] = update.mul_(usable.to(update).unsqueeze(1)).nan_to_num_(0, 0, 0)
        cohort.memory["umf_round"] = torch.where(usable, number, NEVER)
        return reply


class UploadersMemory(Memory):
    """A cohort's memory in which what the idle clients write is gone when training ends."""

    def __init__(self, memory: Memory, uploads: Tensor) -> None:
        self.memory, self.uploads = memory, uploads
        self.seen: dict[str, Tensor] = {}

    def get(self, name: str, default: Tensor) -> Tensor:
        return self.seen[name] if name in self.seen else self.memory.get(name, default)

    def knows(self, name: str) -> Tensor:
        known = self.memory.knows(name)
        return torch.ones_like(known) if name in self.seen else known

    def __setitem__(self, name: str, rows: Tensor) -> None:
        self.seen[name] = rows.detach()
        self.memory.write(name, rows, self.uploads)

    def write(self, name: str, rows: Tensor, clients: Tensor) -> None:
        self.memory.write(name, rows, clients & self.uploads)


def _require_one_start(method: Algorithm, plan: Plan) -> None:
    """Raise `InvalidValue` with the reason unless clients of `method` train from one whole model that they are sent."""
    round = plan.opening()
    message, name = method.send(round), describe(method)
    whole = (plan.layout.size,)
    if not method.single_download:
        raise InvalidValue(
            f"umf: clients of {name} are sent several models, so a stored update has no single start to move"
        )
    if (
        "model" not in message
        or tuple(message["model"].shape[1:]) != whole
        or method.expects(round).get("model") != whole
    ):
        raise InvalidValue(
            f"umf: clients of {name} do not exchange whole models, to which a stored update could be added"
        )
    apart = sorted(other for other, rows in message.items() if other != "model" and len(rows) > 1)
    if apart:
        raise InvalidValue(f"umf: {name} sends each client its own {apart[0]!r}, which an idle client cannot be sent")
