"""DP-SGD: compare with a loop over samples; check the influence of one sample, the cost in epsilon,
and refused methods.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.common.errors import InvalidValue
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.accounting import ORDERS, epsilon
from fedloom.parts.building import build
from fedloom.parts.course import Course
from fedloom.parts.dp_sgd import DPSGD
from fedloom.parts.privacy import AccountedByClient
from fedloom.rounds.engine import RemoteClients
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task
from fedloom.task.making import make_task


class Sites(RowsEngine, RemoteClients):
    largest_share = 1.0


class Recurrent(nn.Module):
    """An LSTM in float64 over the rows of an image; `vmap` does not support it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 6), nn.Linear(6, 10)

    def forward(self, images: Tensor) -> Tensor:
        state = None
        for row in images.flatten(1, 2).unbind(1):
            state = self.cell(row, state)
        assert state is not None
        logits: Tensor = self.head(state[0])
        return logits


def task(kind: str = "linear", clients: int = 6, **training: Any) -> Task:
    models = {
        "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)),
        "convolutions": lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        ),
        "recurrent": Recurrent,
    }
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, inputs, labels = (
            models[kind]().double(),
            torch.randn(220, 1, 8, 8).double(),
            torch.randint(10, (220,)),
        )
    dataset = Dataset(
        "noise", Samples(inputs[:200], labels[:200]), Samples(inputs[200:], labels[200:]), 10
    )
    options = {"learning_rate": 0.1, "batch_size": 8, "steps": 3} | training
    return make_task(
        dataset,
        clients=clients,
        partition="dirichlet(5.0)",
        model=model,
        training=Training(**options),
    )


def run_federation(
    expression: str, on: Task, rounds: int = 2, engine: Any = RowsEngine, **schedule: Any
) -> Federation:
    options = {"participation": 0.5, "evaluate_every": 9, "seed": 3} | schedule
    trained = Federation(build(expression), on, engine(on), Schedule(rounds=rounds, **options))
    trained.run()
    assert all(record["faults"] == [] for record in trained.history)
    return trained


def client_costs(method: AccountedByClient, releases: torch.Tensor) -> list[float]:
    """Return each client's spent epsilon: the cost if no other client trains."""
    costs = []
    for client, count in enumerate(releases.tolist()):
        method.state["releases"] = torch.zeros_like(releases)
        method.state["releases"][client] = count
        costs.append(method.cost())
    method.state["releases"] = releases
    return costs


@pytest.mark.parametrize("method", ["dp_sgd", "local_private"])
def test_spent_epsilon_is_computed_once_per_kind_of_client(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spent epsilon is computed once for each kind of client.

    A thousand clients have four numbers of samples and different numbers of training rounds.
    """
    accounted = build(f"{method}(fedavg, noise=1.5)")
    assert isinstance(accounted, AccountedByClient)
    small = run_federation("fedavg", task(), rounds=1).algorithm.plan
    Course(accounted).setup(replace(small, clients=1000, sizes=lambda clients: 5 + clients % 4))
    releases = torch.randint(7, (1000,), generator=torch.Generator().manual_seed(0))
    releases[:4] = torch.tensor([3, 9, 5, 8])
    costs, later_costs = client_costs(accounted, releases), client_costs(accounted, releases + 1)
    accounted.state["releases"] = releases
    computed: list[float] = []

    def counted(*arguments: Any) -> float:
        computed.append(epsilon(*arguments))
        return computed[-1]

    monkeypatch.setattr(f"{type(accounted).__module__}.epsilon", counted)
    assert (accounted.cost(), accounted.cost(extra=1)) == (max(costs), max(later_costs))
    assert len(computed) <= 8


@pytest.mark.parametrize(
    ("kind", "size", "steps"),
    # With batches of one sample on average, consecutive batches are often empty.
    [("linear", 8, 3), ("convolutions", 8, 3), ("recurrent", 8, 3), ("linear", 1, 20)],
)
def test_a_clients_training_equals_a_loop_over_samples(kind: str, size: int, steps: int) -> None:
    on = task(kind, clients=2, momentum=0.5, weight_decay=0.01, batch_size=size, steps=steps)
    clip, noise = 0.7, 0.3
    trained = run_federation(f"dp_sgd(fedavg, clip={clip}, noise={noise})", on, rounds=1)
    (client,) = trained.history[0]["clients"]
    round = trained._first.at(1)
    batches, noises = (round.stream(f"dp_sgd {name}", client) for name in ("batches", "noise"))
    samples, module = on.samples(client), on.module(on.initial)
    velocity = None
    for _ in range(steps):
        drawn = torch.rand(len(samples), generator=batches, dtype=torch.float64) < size / len(
            samples
        )
        total = torch.zeros_like(on.initial)
        for index in drawn.nonzero()[:, 0].tolist():
            module.zero_grad()
            F.cross_entropy(
                module(samples.inputs[index : index + 1]), samples.labels[index : index + 1]
            ).backward()
            gradient = torch.cat(
                [p.grad.flatten() for p in module.parameters() if p.grad is not None]
            )
            total += gradient * min(1.0, clip / float(gradient.norm()))
        total += noise * clip * torch.randn(1, len(total), generator=noises, dtype=torch.float64)[0]
        row = on.layout.flatten(module)
        step = total / size + 0.01 * row
        velocity = step if velocity is None else 0.5 * velocity + step
        on.layout.load(module, row - 0.1 * velocity)
    assert torch.allclose(trained.model(), on.layout.flatten(module), rtol=0, atol=1e-12)


@pytest.mark.parametrize("inner", ["fedprox(mu=0.1)", "moon", "fedmr"])
def test_without_noise_and_clipping_it_is_plain_training(inner: str) -> None:
    on = task(batch_size=None, steps=None, epochs=3, momentum=0.9, clip=1.0)
    private, plain = (
        run_federation(f"dp_sgd({inner}, clip=1e12, noise=0)", on),
        run_federation(inner, on),
    )
    assert torch.allclose(private.model(), plain.model(), rtol=0, atol=1e-12)


@given(st.floats(1e-2, 10), st.floats(-1e4, 1e4), st.integers(0, 9))
@settings(max_examples=12, deadline=None)
def test_no_sample_moves_a_step_by_more_than_the_clip(
    clip: float, value: float, label: int
) -> None:
    on = task(clients=1, batch_size=None, steps=1)

    def moved(data: Task) -> Tensor:
        return (
            run_federation(
                f"dp_sgd(fedavg, clip={clip}, noise=0)", data, 1, participation=1.0
            ).model()
            - on.initial
        )

    update = moved(on)
    on.train.inputs[0], on.train.labels[0] = value, label
    changed_update = moved(on)
    bound = 0.1 * clip  # learning rate times clip, for all samples together
    assert max(float(update.norm()), float(changed_update.norm())) <= bound * (1 + 1e-9)
    assert float((changed_update - update).norm()) <= 2 * bound / len(on.train) * (1 + 1e-9)


def test_epsilon_is_the_accountants_for_the_client_that_spent_most() -> None:
    library = pytest.importorskip("dp_accounting")
    rdp = pytest.importorskip("dp_accounting.rdp")
    on = task(steps=None, epochs=2)
    trained = run_federation("dp_sgd(umf(fedavg), noise=1.5, delta=1e-4)", on, rounds=4, seed=5)
    spent = []
    for client in range(6):
        size = len(on.samples(client))
        # All idle clients that the next round selects also train and upload their result in that
        # round.
        taking = [client in record["clients"] for record in trained.history]
        rounds = sum(
            this or following for this, following in zip(taking, [*taking[1:], False], strict=True)
        )
        accountant = rdp.RdpAccountant(ORDERS)
        event = library.PoissonSampledDpEvent(min(1, 8 / size), library.GaussianDpEvent(1.5))
        accountant.compose(event, 2 * -(-size // 8) * rounds)
        spent.append(accountant.get_epsilon(1e-4))
    assert trained.history[-1]["epsilon"] == pytest.approx(max(spent), rel=1e-12)
    assert isinstance(trained.algorithm, DPSGD)
    assert client_costs(trained.algorithm, trained.algorithm.state["releases"]) == pytest.approx(
        spent, rel=1e-12
    )
    assert "training_loss" not in trained.history[-1]
    solved = run_federation("dp_sgd(fedavg, target_epsilon=3.0)", on, rounds=3, participation=1.0)
    assert 2.99 < solved.history[-1]["epsilon"] <= 3.0
    limited = run_federation(
        "dp_sgd(fedavg, noise=1.5, target_epsilon=8.0)", on, rounds=9, participation=1.0
    )
    assert limited.algorithm.spent
    assert limited.history[-1]["epsilon"] <= 8.0
    assert 0 < len(limited.history) < 9


def test_a_simulation_repeats_its_batches_and_noise_in_every_engine_and_real_sites_do_not() -> None:
    on = task()
    for expression in ("dp_sgd(fedmr, noise=1.0)", "dp_sgd(fedavg, clip=1.0, noise=0)"):
        model = run_federation(expression, on).model()
        stacked = run_federation(expression, on, engine=StackedEngine)
        assert torch.equal(stacked.model(), model)
        assert any("DPSGD trains one client at a time" in text for text in stacked.notices)
        assert not torch.equal(
            run_federation(expression, on, engine=Sites).model(), model
        )  # without noise in the batches


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        (
            "dp_sgd(ditto, noise=1)",
            "clients of ditto use their samples for more than one local training",
        ),
        (
            "dp_sgd(ala(fedavg), noise=1)",
            "clients of ala use their samples for more than one local training",
        ),
        ("dp_sgd(fedasam, noise=1)", "clients of fedasam use their samples for more"),
        ("dp_sgd(per_fedavg, noise=1)", "clients of per_fedavg use their samples for more"),
        ("dp_sgd(scaffold, noise=1)", "also upload 'variate'"),
        (
            "ala(dp_sgd(fedavg, noise=1))",
            "clients of ala use their samples for more than one local training",
        ),
        ("stages(dp_sgd(fedavg, noise=1):3, fedavg)", "Put dp_sgd around stages"),
        (
            "private(dp_sgd(fedavg, noise=1), noise=1)",
            "dp_sgd counts a separate epsilon. Use only one of them",
        ),
        (
            "dp_sgd(local_private(fedavg, noise=1), noise=1)",
            "local_private counts a separate epsilon",
        ),
        ("dp_sgd(fedavg)", "set noise, such as 0.8"),
    ],
)
def test_methods_that_would_break_the_guarantee_are_refused(expression: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        run_federation(expression, task(), 1)


def test_the_order_of_dp_sgd_and_a_code_makes_no_difference() -> None:
    inside = run_federation("dp_sgd(quantised(fedavg), noise=1)", task())
    outside = run_federation("quantised(dp_sgd(fedavg, noise=1))", task())
    assert inside.history == outside.history
    assert torch.equal(inside.model(), outside.model())


def test_models_and_losses_that_mix_the_samples_of_a_batch_are_refused() -> None:
    normalised = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10, track_running_stats=False)
    )
    with pytest.raises(InvalidValue, match="batch norm mixes the samples of a batch"):
        run_federation("dp_sgd(fedavg, noise=1)", make_task("digits", clients=4, model=normalised))
    weighted = make_task(
        "digits",
        clients=4,
        model="logistic",
        objective=f"classification(class_weights={[1.0] * 10})",
    )
    with pytest.raises(InvalidValue, match="class_weights are divided by their sum over the batch"):
        run_federation("dp_sgd(fedavg, noise=1)", weighted)
    with pytest.raises(InvalidValue, match="set noise over real sites"):
        run_federation("dp_sgd(fedavg, target_epsilon=8)", task(), engine=Sites)


class KeepsMeans(nn.Module):
    """A model with a floating-point buffer that follows the mean of its inputs."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.out = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(64), persistent=persistent)

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.flatten(1)
        if self.training and "seen" in self.state_dict():
            self.seen.lerp_(inputs.detach().mean(0), 0.5)
        logits: Tensor = self.out(inputs)
        return logits


def test_buffers_that_would_be_uploaded_without_noise_are_refused() -> None:
    leaking = make_task("digits", clients=4, model=KeepsMeans(persistent=True))
    with pytest.raises(InvalidValue, match="model's buffer 'seen' would be uploaded without noise"):
        run_federation("dp_sgd(fedavg, noise=1)", leaking, 1)
    run_federation(
        "dp_sgd(fedavg, noise=1)", make_task("digits", clients=4, model=KeepsMeans(False)), 1
    )


@pytest.mark.parametrize("method", ["local_private(fedavg, noise=1)", "private(fedavg, noise=1)"])
def test_other_parts_clip_and_noise_buffers_like_weights(method: str) -> None:
    """Parts clip and noise buffers like weights: a shift of the data moves them by at most the
    clip.
    """
    buffers = []
    for shift in (0.0, 1000.0):
        given = make_task("digits", clients=4, model=KeepsMeans(persistent=True))
        changed = replace(given.train, inputs=given.train.inputs.float() / 255 + shift)
        trained = replace(
            given, train=changed, training=replace(given.training, learning_rate=1e-6)
        )
        federation = Federation(
            build(method), trained, RowsEngine(trained), Schedule(rounds=1, participation=1.0)
        )
        federation.run()
        buffers.append(federation.model()[-64:])
    assert float((buffers[1] - buffers[0]).norm()) <= 2 + 1e-3
