"""Measure privacy and cost of secure recombination, in one run on one machine.

Attack: a server knows which model each client received, and guesses the trainer of each uploaded
layer. It takes the nearest dispatched layer (over all pairs at once, as an assignment, and one by
one), or it assumes no exchange. Success is the share of right guesses over all rounds except the
first, in which all models start equal; chance is 1 / K. Mixing: the share of layers that end at
their owner, which needs no attack. Time: the library's whole exchange between peers in one process,
and FedMR's rounds in a simulation with and without the exchange.

    python benchmarks/secure.py [--rounds 6] [--clients 10] [--repeats 2,4,8]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedloom.algorithm.records import Message, Replies
from fedloom.algorithms.fedmr import FedMR
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout, Unit
from fedloom.flat.population import squared_distances
from fedloom.parts.building import build
from fedloom.parts.secure_recombination import Secure
from fedloom.rounds.federation import Federation, Schedule
from fedloom.secure import (
    InMemoryTransport,
    Peer,
    Rules,
    ServerKey,
    Terms,
    layer_sizes,
    rehearse,
    run_exchange,
    to_layers,
)
from fedloom.secure.exchange import Draw, stream_draw
from fedloom.task import Task
from fedloom.task.making import make_task
from limit import cnn, mlp
from outcome import tell

Guess = dict[str, list[float]]


class Watched(FedMR):
    """FedMR as the server sees it: dispatched and received models, by slot."""

    def send(self, round: Round) -> Message:
        message = super().send(round)
        self.dispatched = message["model"].clone()
        return message

    def receive(self, round: Round, replies: Replies) -> None:
        self.uploaded = replies["model"].clone()
        super().receive(round, replies)


def named_right(
    dispatched: Tensor, uploaded: Tensor, units: list[Unit], trained_by: list[list[int]]
) -> dict[str, float]:
    """Return the share of uploaded layers with a right guess of the trainer, for each guess.

    `trained_by[u][k]` is the truth about layer u of upload k.
    """
    correct = {"nearest": 0, "assigned": 0, "stayed": 0}
    count = len(dispatched)
    for unit, truth in zip(units, trained_by, strict=True):
        rows = torch.cat(
            [torch.cat([rows[:, span] for span in unit], 1) for rows in (uploaded, dispatched)]
        ).double()
        distances = squared_distances(rows)[:count, count:]
        guesses = {
            "nearest": distances.argmin(1).tolist(),
            "assigned": linear_sum_assignment(distances.numpy())[1].tolist(),
            "stayed": list(range(count)),
        }
        for name, guess in guesses.items():
            correct[name] += sum(
                guessed == trainer for guessed, trainer in zip(guess, truth, strict=True)
            )
    return {name: hits / (count * len(units)) for name, hits in correct.items()}


def attack(
    task: Task, clients: int, rounds: int, when: str | None, repeats: int
) -> dict[str, object]:
    """Return the attacks' success over `rounds` rounds after the first."""
    watched = Watched()
    method = Secure(watched, repeats=repeats, when=when) if when else watched  # type: ignore[arg-type]
    run = Federation(
        method, task, RowsEngine(task), Schedule(rounds=rounds + 1, participation=1.0, seed=1)
    )
    units = task.layout.units("layer")
    successes: Guess = {"nearest": [], "assigned": [], "stayed": []}
    for _ in range(rounds + 1):
        record, _ = run.step()
        selected = record["clients"]
        round = Round(
            record["round"], rounds + 1, 1, clients, clients, 0.0, 0.0, selected=tuple(selected)
        )
        truth = [list(range(clients)) for _ in units]
        if isinstance(method, Secure) and when != "before_train":
            truth = method.rehearse(round, selected, "before_upload").sources
        if record["round"] > 1:
            for name, share in named_right(
                watched.dispatched, watched.uploaded, units, truth
            ).items():
                successes[name].append(share)
    shares = {name: statistics.fmean(values) for name, values in successes.items()}
    return {
        "exchange": when or "none",
        "repeats": repeats if when else 0,
        **shares,
        "chance": 1 / clients,
    }


def mixing(peers: int, units: int, rules: Rules, exchanges: int = 300) -> dict[str, object]:
    """Return the share of unmoved layers after an exchange, and its traffic in models per peer.

    An unmoved layer is still with its owner. Equation 27 gives the traffic.
    """
    shared = stream_draw(stream(0, "mixing"))

    def choices(peer: int, purpose: str) -> Draw:
        return shared

    stayed = [
        sum(position == origin for source in rehearse(range(peers), units, rules, choices, "before_upload").sources
            for position, origin in enumerate(source)) / (peers * units)
        for _ in range(exchanges)
    ]  # fmt: skip
    high = "default" if rules.high is None else str(rules.high)
    return {
        "repeats": rules.repeats, "low": rules.low, "high": high, "stayed": statistics.fmean(stayed),
        "chance": 1 / peers, "models_sent_per_peer": sum(map(sum, rules.bounds(units))) / units,
    }  # fmt: skip


class CountingTransport(InMemoryTransport):
    """Counts the bytes of the peers' messages."""

    carried = 0

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        answers = super().carry(requests)
        self.carried += sum(map(len, answers.values()))
        return answers


def exchange_seconds(
    name: str, layout: Layout, row: Tensor, when: str, count: int
) -> dict[str, object]:
    """Run the whole exchange of the library, with the work of all peers in turn in this process."""
    units = layout.units("layer")
    rules = Rules()
    identities = {k: Ed25519PrivateKey.generate() for k in range(count)}
    public_keys = {k: identity.public_key() for k, identity in identities.items()}
    peers = {k: Peer(k, identity, public_keys, rules) for k, identity in identities.items()}
    key, seconds = ServerKey(), []
    for number in range(1, 4):
        for k, peer in peers.items():
            peer.offer(to_layers(row + k, units))
        sizes = tuple(layer_sizes(units, row))
        terms = Terms("benchmark", number, when, 0, tuple(peers), key.public, rules, sizes)
        began = time.perf_counter()
        transport = CountingTransport(peers)
        terms, _ = run_exchange(transport, terms)
        if when == "before_upload":
            key.open_models({k: peer.upload() for k, peer in peers.items()}, terms)
        seconds.append(time.perf_counter() - began)
    megabytes = sum(layer_sizes(units, row)) / 1e6
    taken = statistics.median(seconds)
    return {
        "model": name, "when": when, "peers": count, "model_MB": megabytes, "carried_MB": transport.carried / 1e6,
        "seconds": taken, "seconds_per_peer": taken / count,
    }  # fmt: skip


def simulated(task: Task, rounds: int) -> list[dict[str, object]]:
    """Return seconds of a simulated round: plain FedMR and FedMR with the exchange, in turn."""
    expressions = ("fedmr", "secure(fedmr)", "secure(fedmr, repeats=8)")
    runs = {
        e: Federation(
            build(e), task, RowsEngine(task), Schedule(rounds=rounds, participation=1.0, seed=1)
        )
        for e in expressions
    }
    seconds: Guess = {e: [] for e in expressions}
    for _ in range(rounds):
        for expression, run in runs.items():
            began = time.perf_counter()
            run.step()
            seconds[expression].append(time.perf_counter() - began)
    plain = statistics.median(seconds["fedmr"])
    medians = {expression: statistics.median(taken) for expression, taken in seconds.items()}
    return [
        {"method": e, "seconds_a_round": s, "over_fedmr": s / plain} for e, s in medians.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--repeats", default="2,4,8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    training = {"learning_rate": 0.1, "momentum": 0.5, "batch_size": 20, "epochs": 2}
    task = make_task(
        "digits",
        clients=options.clients,
        partition="dirichlet(0.5)",
        model="mlp",
        training=training,
    )
    repeats = [int(text) for text in options.repeats.split(",")]
    rows = [attack(task, options.clients, options.rounds, None, 0)]
    for when in ("before_train", "before_upload", "both"):
        rows += [attack(task, options.clients, options.rounds, when, r) for r in repeats]
    tell("layers named right by the server, FedMR on digits", rows)
    units = 8
    rules = [Rules(r) for r in (1, 2, 4, 8, 16)] + [Rules(r, units, units) for r in (1, 2, 4, 8)]
    tell(
        f"layers left with their owners, {units} layers",
        [mixing(options.clients, units, rule) for rule in rules],
    )
    sizes = []
    for name, module in (("mlp", mlp()), ("cnn", cnn())):
        layout = Layout(module)
        row = layout.flatten(module)
        sizes += [
            exchange_seconds(name, layout, row, when, options.clients)
            for when in ("before_train", "before_upload")
        ]
    tell("the library's exchange", sizes)
    tell("secure over plain FedMR in the simulator, digits", simulated(task, options.rounds))


if __name__ == "__main__":
    main()
