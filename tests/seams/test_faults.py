"""Interactions of two parts: missing replies, sampling, accounting, decoding and checks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.algorithm.method import Method, components
from fedloom.algorithm.records import Aggregate, Message, Selection
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from fedloom.parts.dp_sgd import DPSGD
from fedloom.parts.hooks import Part
from fedloom.parts.local_private import LocalPrivate
from fedloom.rounds.clock import Clock
from fedloom.rounds.federation import Federation
from seams.setting import SIZES, answered, federation, small_task


def steps(run: Federation, count: int) -> None:
    for _ in range(count):
        run.step()


def require_refusal(expression: str, reason: str, **options: object) -> None:
    """Require a one-line error with `reason` at set-up of the combination."""
    with pytest.raises(InvalidValue, match=re.escape(reason)) as caught:
        federation(expression, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


# --- methods with one model per client ---


def variance(rows: Tensor) -> float:
    return float(sum((row - sum(rows) / len(rows)).square().sum() for row in rows)) / len(rows)


def test_the_blend_counts_absent_slots_as_they_were_sent() -> None:
    run, recording = federation("fedmr(blend=auto, tolerance=0.05)", rounds=5, dropout=0.4)
    trainable, initial = run.task.layout.trainable, run.task.initial.clone()
    for number in range(1, 6):
        pool_before = run.algorithm.state["pool"].clone()
        run.step()
        clients, present = run.history[-1]["clients"], answered(run, recording, number)
        assert 0 < len(present) < len(clients) or number > 1
        records = recording.of(number)
        for slot, client in enumerate(clients):
            if client in records:
                assert torch.equal(records[client].inbox["model"], pool_before[slot])
        if not present:
            continue
        pool = torch.stack(
            [
                records[client].reply["model"] if client in present else pool_before[slot]
                for slot, client in enumerate(clients)
            ]
        )
        weight = sum(SIZES[client] for client in present)
        mean = sum(SIZES[client] / weight * records[client].reply["model"] for client in present)
        assert isinstance(mean, Tensor)
        bound = 0.05 * float((mean - initial)[:trainable].square().sum())
        spread = variance(pool[:, :trainable]) * variance((pool - pool_before)[:, :trainable])
        share = max(0.0, 1 - bound**2 / spread)
        assert run.algorithm.diagnose()["blend"] == pytest.approx(share, rel=1e-9)
        torch.testing.assert_close(
            run.model(), (1 - share) * pool.mean(0) + share * mean, rtol=1e-9, atol=1e-9
        )


def test_each_update_is_clipped_from_the_model_that_its_client_was_sent() -> None:
    """K is even and mutations are opposite, so the mean of the downloads is the model."""
    task, radius = small_task(sizes=SIZES[:8]), 0.1
    expression = f"robust(fedmut(beta=0.0), rule=clipping, radius={radius})"
    run, recording = federation(expression, task, awaited=4, rounds=5)
    for number in range(1, 6):
        run.step()
        records = list(recording.of(number).values())
        assert len(records) == 4
        mean_sent = torch.stack([record.inbox["model"] for record in records]).mean(0)
        updates = [record.reply["model"] - record.inbox["model"] for record in records]
        clipped = [update * min(1.0, radius / float(update.norm())) for update in updates]
        expected = mean_sent + torch.stack(clipped).mean(0)
        torch.testing.assert_close(run.model(), expected, rtol=1e-9, atol=1e-9)


def test_clients_that_return_what_they_were_sent_move_nothing() -> None:
    task = small_task(sizes=SIZES[:8])
    run, recording = federation(
        "robust(fedmut(beta=0.0), rule=clipping, radius=0.1)", task, awaited=8, rounds=4
    )
    steps(run, 2)
    algorithm = run.pipeline.algorithm
    train = algorithm.train
    algorithm.train = lambda cohort, inbox: (
        train(cohort, inbox) and {"model": inbox["model"].clone()}
    )  # type: ignore[method-assign]
    model_before = run.model().clone()
    run.step()
    assert len(recording.of(3)) == 8
    torch.testing.assert_close(run.model(), model_before, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("inner", ["fedmut", "fedmut(beta=0.0)"])
def test_private_refuses_models_of_each_client(inner: str) -> None:
    require_refusal(
        f"private({inner}, noise=0.5)",
        f"private: {inner} sends each client a different model, which depends on the other clients",
    )


ASYNCHRONOUS = ["fedbuff({}, k=2)", "fedasync({})"]


@pytest.mark.parametrize("method", ASYNCHRONOUS)
@pytest.mark.parametrize("inner", ["fedavg", "fedprox(mu=0.1)", "ditto"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_asynchronous_methods_go_on_without_clients_that_drop_out(
    method: str, inner: str, dropout: float
) -> None:
    run, _ = federation(method.format(inner), rounds=8, dropout=dropout)
    initial = run.model().clone()
    steps(run, 8)
    assert run.finished == 8
    assert bool(torch.isfinite(run.model()).all())
    assert not torch.equal(run.model(), initial)


@pytest.mark.parametrize("method", ASYNCHRONOUS)
@pytest.mark.parametrize("inner", ["fedmut", "indep", "fedmr", "scaffold"])
def test_asynchronous_methods_refuse_more_than_a_mean_of_models(method: str, inner: str) -> None:
    require_refusal(method.format(inner), f"{inner} does more than average whole models")


@pytest.mark.parametrize(
    "expression",
    [
        "stages(fedavg:1, stages(scaffold:1, fedmr))",
        "stages(fedavg:1, stages(scaffold:3, fedmr))",
        "stages(fedavg:1, umf(stages(scaffold:1, fedmr)))",
        "stages(stages(fedavg:auto, fedmut, patience=1):2, fedavg)",
        "stages(fedavg:1, stages(fedavg:auto, fedmut, patience=1))",
        "stages(fedavg:auto, stages(scaffold:1, fedmr), patience=1, improvement=0.9)",
    ],
)
def test_stages_inside_stages_run_without_faults(expression: str) -> None:
    run, _ = federation(expression, awaited=9, rounds=6)
    steps(run, 6)
    assert [record["faults"] for record in run.history] == [[]] * 6


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (
            "stages(fedavg:auto, stages(fedavg:auto, fedmr), patience=1)",
            "only one of nested stages may end by :auto",
        ),
        ("stages(apple:auto, fedavg)", "stages: clients of apple do not receive one model"),
        ("stages(fedfomo:auto, fedavg)", "stages: clients of fedfomo do not receive one model"),
        (
            "stages(fedper:auto, fedavg)",
            "stages: clients of fedper do not exchange one whole model",
        ),
    ],
)
def test_stages_whose_end_nobody_can_judge_are_refused(expression: str, reason: str) -> None:
    require_refusal(expression, reason, awaited=9)


# --- accounting ---


UNWEIGHTED = "fedavg(weighted=false)"
IDLE = ["umf(fedavg)", "umf(fedavg, simulate_all=true)"]
SERVERS = ["robust({}, rule=median)", "quantised({})", "{}"]
SELECTIVE = ["clustered({})", "clustered({}, by=size)"]
STAGED = "stages({}:3, fedavg)"
ACCOUNTED = pytest.mark.parametrize(
    "accounted", ["dp_sgd({}, noise=1.0)", "local_private({}, noise=1.0)"]
)


def private_part(method: Method) -> Part:
    """Return the part of an expression that protects the uploads of clients."""
    return next(part for part in components(method) if isinstance(part, DPSGD | LocalPrivate))


@ACCOUNTED
@pytest.mark.parametrize(
    ("expression", "method"),
    [
        *itertools.product(SERVERS, [UNWEIGHTED, *IDLE, STAGED.format(UNWEIGHTED)]),
        *itertools.product(SELECTIVE, [UNWEIGHTED, *IDLE]),
        *itertools.product(["secure({})", "fedbuff({}, k=3)"], [UNWEIGHTED]),
    ],
)
def test_epsilon_counts_the_rounds_in_which_clients_trained(
    expression: str, accounted: str, method: str
) -> None:
    run, recording = federation(expression.format(accounted.format(method)), rounds=6)
    private = private_part(run.algorithm)
    steps(run, 6)
    counted = [0] * len(SIZES)
    for number in range(1, run.finished + 1):
        for client, record in recording.of(number, private).items():
            counted[client] += record.uploads or accounted.startswith("dp_sgd")
    assert sum(counted) > 0
    assert private.state["releases"].tolist() == counted


@ACCOUNTED
@pytest.mark.parametrize(
    ("expression", "method", "reason"),
    [
        *(("secure({})", method, "needs the client of each upload") for method in IDLE),
        *(
            (STAGED, method, "the other stages would have no privacy")
            for method in [UNWEIGHTED, *IDLE]
        ),
        *(("fedbuff({}, k=3)", method, "decides when clients train") for method in IDLE),
    ],
)
def test_what_would_miscount_epsilon_is_refused(
    expression: str, accounted: str, method: str, reason: str
) -> None:
    require_refusal(expression.format(accounted.format(method)), reason)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        (
            "stages(dp_sgd({}, noise=1.0):auto, fedavg)",
            "stages use their samples for more than one local training, which epsilon",
        ),
        (
            "stages(local_private({}, noise=1.0):auto, fedavg)",
            "the other stages would have no privacy",
        ),
        (
            "dp_sgd(stages({}:auto, fedavg), noise=1.0)",
            "stages use their samples for more than one local training, which epsilon",
        ),
        (
            "local_private(stages({}:auto, fedavg), noise=1.0)",
            "also upload '@held_out_loss', which would leak",
        ),
    ],
)
@pytest.mark.parametrize("method", [UNWEIGHTED, *IDLE])
def test_held_out_losses_are_not_private(expression: str, reason: str, method: str) -> None:
    require_refusal(expression.format(method), reason)


def test_over_selection_does_not_let_another_client_in() -> None:
    """If another client replaced an absent one, the sums would differ by two clips."""
    clock = Clock(speed="stragglers(100, 10)", over_selection=0.8)
    require_refusal(
        "private(fedavg, noise=1.0)", "another client replaces a missing one", clock=clock
    )


WITH_FEW = [
    "private(fedavg, noise=0.5)",
    "secure(fedavg(weighted=false))",
    "secure(fedmut)",
    *(
        f"{wrapper}({inner}, noise=0.5)"
        for wrapper in ("local_private", "dp_sgd")
        for inner in ("fedavg", "fedmut")
    ),
    *(
        wrapper.format(inner)
        for inner in ("fedavg", "fedmut", "scaffold")
        for wrapper in (
            "quantised({}, down=8)",
            "sparse({}, share=0.3)",
            "lowrank({}, rank=1)",
            "ala({})",
            "umf({})",
            "stages({}:2, fedavg)",
            "stages({}:auto, fedavg)",
        )
    ),
]
FEW: dict[str, Any] = {"awaited": 1, "rounds": 8, "participation_mode": "poisson"}


@pytest.mark.parametrize("expression", WITH_FEW)
def test_rounds_of_no_client_and_of_one_are_rounds(expression: str) -> None:
    run, _ = federation(expression, **FEW)
    steps(run, 8)
    assert {0, 1} <= {len(record["clients"]) for record in run.history}
    assert bool(torch.isfinite(run.model()).all())


def test_a_private_quantile_needs_more_clients_than_its_rounds_have() -> None:
    run, _ = federation("private(fedavg, noise=0.5, quantile=0.5)", **FEW)
    with pytest.raises(
        InvalidValue, match="private: quantile needs more than 5 clients in a round, not 1"
    ):
        steps(run, 8)


@pytest.mark.parametrize("inner", ["fedavg", "fedmut", "scaffold"])
@pytest.mark.parametrize("options", ["rule=median", "rule=clipping", "rule=krum, malicious=0"])
def test_robust_rules_refuse_rounds_of_fewer_than_three(inner: str, options: str) -> None:
    require_refusal(
        f"robust({inner}, {options})", "needs at least 3 replies in a round, not 1", **FEW
    )


@pytest.mark.parametrize("wrapper", ["private", "local_private", "dp_sgd"])
def test_privacy_refuses_uploads_beside_the_model(wrapper: str) -> None:
    require_refusal(
        f"{wrapper}(scaffold, noise=0.5)",
        "clients of scaffold also upload 'variate', which would leak",
    )


@pytest.mark.parametrize("inner", ["fedavg", "scaffold"])
def test_secure_exchanges_refuse_uploads_with_a_name(inner: str) -> None:
    require_refusal(
        f"secure({inner})", f"{inner} needs the client of each upload, which the exchange hides"
    )


@pytest.mark.parametrize("scale", [math.inf, 1e200, 1e40])
def test_a_sample_of_infinite_gradient_does_not_make_the_upload_nan(scale: float) -> None:
    task = small_task()
    task.train.inputs[2] = scale
    run, recording = federation(
        "dp_sgd(fedavg, noise=0)", task, awaited=9
    )  # no evaluation in round 1 of 4
    run.step()
    assert run.history[0]["faults"] == []
    for record in recording.of(1).values():
        assert bool(torch.isfinite(record.reply["model"]).all())


# --- time and staleness ---


def test_a_round_without_arrivals_is_no_version() -> None:
    """A round without arrivals does not count for staleness.

    Two clients train at a time. No client answers in time in round 2. The reply of round 3 is thus
    as fresh as in round 1.
    """
    clock = Clock(speed=20.0, deadline=0.2)
    run, recording = federation(
        "fedbuff(fedavg(weighted=false), k=2)", awaited=2, rounds=6, clock=clock
    )
    under_way: list[tuple[float, int, int, Tensor, Tensor]] = []
    model, elapsed, version = run.task.initial.clone(), 0.0, 0
    empty = 0
    for number in range(1, 7):
        run.step()
        for client in run.history[-1]["clients"]:
            record = recording.of(number)[client]
            torch.testing.assert_close(record.inbox["model"], model, rtol=1e-9, atol=1e-9)
            under_way.append(
                (
                    elapsed + SIZES[client] / 20.0,
                    client,
                    version,
                    record.inbox["model"],
                    record.reply["model"],
                )
            )
        under_way.sort(key=lambda entry: entry[:2])
        closes = elapsed + 0.2
        taken = [entry for entry in under_way[:2] if entry[0] <= closes]
        elapsed = taken[-1][0] if len(taken) == 2 else closes
        under_way = under_way[len(taken) :]
        if taken:
            moved = [
                (back - sent) * (1 + version - since) ** -0.5 for _, _, since, sent, back in taken
            ]
            model, version = model + sum(moved) / len(moved), version + 1
        empty += not taken
        torch.testing.assert_close(run.model(), model, rtol=1e-9, atol=1e-9)
    assert empty, "every round had an arrival, so nothing was shown"


@pytest.mark.parametrize(
    "wrapper", ["dp_sgd({}, noise=0.1)", "local_private({}, noise=0.1)", "quantised({})"]
)
def test_wrappers_of_asynchronous_methods_go_by_their_time(wrapper: str) -> None:
    clock, times = Clock(speed="stragglers(100, 10)", deadline=0.3), []
    for expression in ("fedbuff(fedavg, k=3)", wrapper.format("fedbuff(fedavg, k=3)")):
        run, _ = federation(expression, clock=clock)
        steps(run, 3)
        times.append([record["simulated_seconds"] for record in run.history])
    assert times[0] == times[1]


def test_the_bound_of_krum_is_that_of_the_replies_awaited() -> None:
    clock = Clock(speed=100.0, over_selection=0.25)
    with pytest.raises(InvalidValue, match="robust"):
        federation("robust(fedavg, rule=krum)", awaited=4, clock=clock)


@pytest.mark.parametrize(
    "coded", ["quantised(fedavg)", "quantised(fedavg, down=8)", "sparse(fedavg, share=0.2)"]
)
def test_coded_bytes_take_the_same_time_inside_stages(coded: str) -> None:
    seconds = []
    for expression in (coded, f"stages({coded}:9, fedavg)"):
        run, _ = federation(expression, clock=Clock(up=1000.0, down=10_000.0))
        run.step()
        seconds.append((run.history[0]["simulated_seconds"], run.history[0]["bytes_up"]))
    assert seconds[0] == seconds[1]


# --- integer buffers and decoded replies ---


def lying(lie: int) -> Callable[[int, int, dict[str, Tensor]], dict[str, Tensor]]:
    def tamper(number: int, client: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if client == 4:
            tensors = {
                n: torch.full_like(t, lie) if t.dtype == torch.int64 else t
                for n, t in tensors.items()
            }
        return tensors

    return tamper


@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "krum", "multi_krum", "clipping"])
@pytest.mark.parametrize("lie", [2**63 - 1, 10**6, 0, -1, -(2**63)])
def test_one_client_moves_the_integer_buffers_no_further_than_honest_ones(
    rule: str, lie: int
) -> None:
    runs = []
    for tamper in (None, lying(lie)):
        run, recording = federation(
            f"robust(fedavg, rule={rule})", small_task("norm"), awaited=9, rounds=2
        )
        run.engine.tamper = tamper  # type: ignore[attr-defined]
        steps(run, 2)
        runs.append(run)
        honest = torch.stack(
            [record.counters for record in recording.of(2).values() if record.client != 4]
        )
        assert bool((run.integers >= 1).all())
        assert bool((run.integers <= honest.amax(0)).all())


@pytest.mark.parametrize("lie", [2**63 - 1, -1])
def test_integer_buffers_do_not_overflow_at_honest_clients(lie: int) -> None:
    run, recording = federation("fedavg", small_task("norm"), awaited=9, rounds=3)
    run.engine.tamper = lying(lie)  # type: ignore[attr-defined]
    for number in range(1, 4):
        run.step()
        assert bool(
            (torch.stack([record.counters for record in recording.of(number).values()]) > 0).all()
        )
        assert bool((run.integers > 0).all())


def hostile(number: int, client: int, reply: Message) -> Message:
    if client != 4:
        return reply
    names = ("scales", "values", "factors")
    sign = torch.tensor([-3e38, 3e38])
    return {
        name: sign.to(rows).repeat(rows.numel() // 2 + 1)[: rows.numel()].view(rows.shape)
        if name.rpartition(".")[2] in names
        else rows
        for name, rows in reply.items()
    }


@pytest.mark.parametrize(
    "inner", ["fedavg", "robust(fedavg, rule=clipping)", "robust(fedavg, rule=median)"]
)
@pytest.mark.parametrize("coded", ["quantised({})", "sparse({}, share=0.5)", "lowrank({}, rank=1)"])
def test_what_decodes_to_no_finite_model_is_refused_by_client(coded: str, inner: str) -> None:
    run, _ = federation(
        coded.format(inner), small_task("float32"), change=hostile, awaited=9, rounds=3
    )
    decodes = coded.startswith(
        "sparse"
    )  # 3e38 is a valid float, so plain averaging accepts it for one round
    steps(run, 1 if decodes and inner == "fedavg" else 2)
    assert bool(torch.isfinite(run.model()).all())
    for record in run.history:
        faults = [fault["client"] for fault in record["faults"]]
        assert faults == [4] or (decodes and faults == [])


# --- inputs and outputs of methods ---


class TrainsNothing(FedAvg):
    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return {"model": cohort.fit(inbox["model"], epochs=0).model}


def test_clients_that_train_no_epoch_leave_the_model() -> None:
    run, _ = federation(TrainsNothing(), rounds=1)
    run.step()
    torch.testing.assert_close(
        run.model(), run.task.initial, rtol=1e-12, atol=1e-12
    )  # a mean of equal models


class Shares(FedAvg):
    """Clients return an additional share, and every second client returns an integer."""

    parity = 0
    """Clients with a number of this parity return an integer."""

    def expects(self, round: Round) -> dict[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "share": (1,)}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        (client,) = cohort.clients
        share = (
            torch.tensor([[1]])
            if client % 2 == self.parity
            else inbox["model"].new_tensor([[client + 0.75]])
        )
        return {**super().train(cohort, inbox), "share": share}

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        self.state["share"] = aggregate.mean["share"].reshape(1)


@pytest.mark.parametrize("parity", [0, 1])
def test_a_reply_of_another_type_is_refused_and_the_others_are_averaged(parity: int) -> None:
    method = Shares()
    method.parity = parity
    run, _ = federation(method, awaited=9, rounds=1)
    run.step()
    faults = {fault["client"]: fault["reason"] for fault in run.history[0]["faults"]}
    assert faults.keys() == {client for client in range(9) if client % 2 == parity}
    assert all(
        "Shares.train returned 'share' as int64, not float64" in reason
        for reason in faults.values()
    )
    others = [client for client in range(9) if client % 2 != parity]
    expected = sum(SIZES[client] * (client + 0.75) for client in others) / sum(
        SIZES[client] for client in others
    )
    assert float(run.algorithm.state["share"]) == pytest.approx(expected)


class OwnIntegers(FedAvg):
    """A method that sends and stores a tensor named `integers`."""

    def setup(self, plan: object) -> None:
        super().setup(plan)  # type: ignore[arg-type]
        self.state["integers"] = torch.zeros(2, dtype=torch.float64)

    def send(self, round: Round) -> Message:
        return {**super().send(round), "integers": self.state["integers"].unsqueeze(0)}

    def expects(self, round: Round) -> dict[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "integers": (2,)}

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return {**super().train(cohort, inbox), "integers": inbox["integers"] + 1.5}

    def update(self, round: Round, aggregate: Aggregate) -> None:
        super().update(round, aggregate)
        self.state["integers"] = aggregate.mean["integers"]


@pytest.mark.parametrize("model", ["plain", "norm"])
def test_a_method_may_call_something_integers(model: str, tmp_path: Path) -> None:
    run, recording = federation(OwnIntegers(), small_task(model), directory=tmp_path, rounds=4)
    steps(run, 2)
    assert run.algorithm.state["integers"].tolist() == [3.0, 3.0]
    run.save()
    resumed, recording = federation(OwnIntegers(), small_task(model), directory=tmp_path, rounds=4)
    assert resumed.algorithm.state["integers"].tolist() == [3.0, 3.0]
    steps(resumed, 1)
    assert all(
        record.inbox["integers"].tolist() == [3.0, 3.0] for record in recording.of(3).values()
    )
    assert resumed.algorithm.state["integers"].tolist() == [4.5, 4.5]
    if model == "norm":
        assert bool((resumed.integers > run.integers).all())


class HalvedDownload(Part):
    """A part that changes downloads."""

    def message(self, round: Round, message: Message) -> Message:
        return {name: rows / 2 for name, rows in message.items()}


def test_a_part_may_change_what_is_sent() -> None:
    run, recording = federation(HalvedDownload(build("fedavg")), rounds=1)
    start = run.model().clone()
    run.step()
    for record in recording.of(1).values():
        assert torch.equal(record.inbox["model"], start / 2)


def test_an_exchange_among_other_clients_keeps_every_message() -> None:
    run, _ = federation(HalvedDownload(build("quantised(fedavg, down=8)")), rounds=1)
    exchange = run.pipeline.open(run.course.plan.opening(), Selection((0, 1)))
    among = exchange.among((2, 3, 4))
    assert among.selection.clients == among.round.selected == (2, 3, 4)
    assert torch.equal(among.moved["model"], among.sent["model"] / 2)
    for name in ("sent", "moved", "wire"):
        before, after = getattr(exchange, name), getattr(among, name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
