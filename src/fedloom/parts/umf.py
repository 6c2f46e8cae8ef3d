import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch

from fedloom.algorithm.method import Facts, algorithms, components
from fedloom.algorithm.records import Message, Selection, started_from
from fedloom.common.fields import Probability
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import Inner, Part

NEVER = -1


@algorithms.register("umf")
class Umf(Part):
    """FedUmf (unauthorised model fusion) over any method: idle clients train too, and fuse their
    last update when selected.

    Every client receives each round's model w_t. A selected client that was idle in the round
    before starts from w_t + alpha (eta_t / eta_{t-1}) g_i, every other client from w_t; all train,
    and g_i <- trained - start, `[T]`, is overwritten in each round. Only selected clients upload.
    `umf(fedavg(weighted=false))` is the paper's FedUmf. g_i moves only the start: proximal terms
    and drifts remain centred at the received model. The inner method's memory of idle clients stays
    unchanged, since the server never sees their work. If a method sends each client a different
    model (FedMR, Indep, FedMut), idle clients receive the global model, and g_i is fused into the
    next received slot.

    Bytes down are counted once for each of the N clients (a broadcast medium carries that message
    once: divide by N).
    Source: FedUmf (Mathematics 2022), algorithm 1.
    Use it when few clients take part in a round, all can receive the model, and local computing is
    cheaper than traffic.

    Args:
        alpha: Weight of the stored update (paper: 0.1, 0.5 or 1); 0 is the inner method.
        simulate_all: Train all idle clients, not only the clients of the next round. The results
            are the same.
    """

    alpha: Probability = 1.0
    simulate_all: bool = False

    once: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("one download", "whole models", "common messages")

    @property
    def facts(self) -> Facts:
        # No idle client trains in the last round, so the number of rounds must be known.
        return Facts(needs_total_rounds=not self._trains_all)

    @property
    def _trains_all(self) -> bool:
        """True if all idle clients train, not only the clients of the next round."""
        return self.simulate_all or not all(
            inner.facts.foreseeable for inner in components(self.method)
        )

    def select(self, round: Round, inner: Inner) -> Selection:
        chosen = inner.select(round)
        candidates: Iterable[int] = range(round.clients)
        if inner.foreseeable and not self._trains_all:
            following = round.at(round.number + 1)
            candidates = inner.select(following).clients if round.number < round.rounds else ()
        idle = tuple(client for client in candidates if client not in set(chosen.clients))
        return replace(chosen, idle=idle, receivers=round.clients)

    def train(self, cohort: Cohort, inbox: Message, inner: Inner) -> Message:
        sent = inbox["model"]
        trainable = cohort.layout.trainable
        idle = ~cohort.uploads
        number = cohort.round.number
        update = cohort.memory.get("umf_update", sent.new_zeros(1, trainable))
        written = cohort.memory.get("umf_round", torch.full((1,), NEVER))
        fuses = (written.cpu() == number - 1) & ~idle
        ratio = cohort.round.rate_change
        start = sent.clone()
        start[:, :trainable] += update.mul(self.alpha * ratio).mul_(fuses.to(update).unsqueeze(1))
        shielded = copy.copy(cohort)
        # Writes of idle clients are dropped.
        shielded.memory = cohort.memory.shielded(cohort.uploads)
        reply = inner.train(shielded, started_from(start, inbox))
        update = reply["model"][:, :trainable] - start[:, :trainable]
        usable = idle & torch.isfinite(update.sum(1)).cpu()
        cohort.memory["umf_update"] = update.mul_(usable.to(update).unsqueeze(1)).nan_to_num_(
            0, 0, 0
        )
        cohort.memory["umf_round"] = torch.where(usable, number, NEVER)
        return reply
