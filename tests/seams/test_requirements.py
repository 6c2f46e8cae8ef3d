"""Manual tables of the hooks of each part, and of compatible algorithms and parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.algorithm import Facts
from fedloom.algorithm.method import algorithms, needs_total_rounds
from fedloom.algorithm.records import Message
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import InvalidValue
from fedloom.common.round import Round
from fedloom.local.cohort import Cohort
from fedloom.parts.hooks import HOOKS, Part
from fedloom.rounds.clock import Clock
from seams.cases import WRAPPERS, needs_method
from seams.setting import federation, small_task

# --- the hooks of each part ---

CODING = {"encode", "coded", "decode"}
ARRIVING = {"select", "message", "close", "report"}
ACCOUNTS = {"account", "report"}

HOOKS_OF: dict[str, set[str]] = {
    "umf(fedavg)": {"select", "train"},
    "ala(fedavg)": {"train", "personalise"},
    "ala_code(fedavg)": {"train", "personalise"},
    "fedala": {"train", "personalise"},
    "fedala_code": {"train", "personalise"},
    "fedah": {"train", "personalise"},
    "clustered(fedavg)": {"select", "observe"},
    "clustered(fedavg, by=size)": {"select"},
    "clusamp": {"select", "observe"},
    "power_of_choice(fedavg)": {"poll", "select"},
    "power_of_choice(fedavg, ask=false)": {"select", "observe"},
    "fedntd(fedavg)": {"train"},
    "fedlc(fedavg)": {"train"},
    "feddecorr(fedavg)": {"train"},
    "dp_sgd(fedavg, noise=1.0)": {"train", *ACCOUNTS},
    "partial_work(fedavg)": {"train"},
    "sign_flip(fedavg)": {"corrupt"},
    "local_private(fedavg, noise=1.0)": {"encode", *ACCOUNTS},
    "quantised(fedavg)": CODING,
    "quantised(fedavg, down=8)": {*CODING, "encode_down", "decode_down"},
    "sparse(fedavg)": CODING,
    "lowrank(fedavg, rank=1)": CODING,
    "secure(fedmr)": {"move", "exchange", "account"},
    "secure(fedmr, when=before_train)": {"move", "exchange", "account"},
    "secure(fedmr, when=before_upload)": {"exchange", "account"},
    "fedbuff(fedavg, k=3)": ARRIVING,
    "fedasync(fedavg)": ARRIVING,
    "fedmr_async(k=3)": ARRIVING,
    "ca2fl(k=3)": ARRIVING,
    "fedvarp": {"encode", "rewrite"},
    "mifa": {"encode", "rewrite"},
    "fedstale": {"encode", "expects", "rewrite"},
    "cluster_fedvarp(clusters=2)": {"rewrite"},
    "longest_idle(fedavg)": {"select", "account"},
    "fedlaavg": {"select", "account"},
    "ema(fedavg)": {"follow", "evaluated"},
    "last(fedavg)": {"follow", "evaluated"},
    "fisher_merge(fedavg)": {"train", "expects", "rewrite"},
    "robust(fedavg)": {"rewrite", "integers"},
    "norm_bound(fedavg, radius=0.1)": {"rewrite"},
    "private(fedavg, noise=1.0)": {"select", "release", "report"},
    "stages(fedavg:auto, fedmr)": {"train", "expects", "rewrite"},
    "gossip(fedavg)": {"select", "message", "deploy", "observe", "mix", "report"},
}
"""The hooks that the outermost part of an expression uses."""

WITHOUT_INTEGERS = ("dp_sgd", "local_private", "private")
EVERYBODY = ("private", "gossip")


def calls_of(part: Part) -> set[str]:
    """Return a set that collects the names of the called hooks of a part."""
    called: set[str] = set()

    def watch(hook: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any) -> Any:
            called.add(hook)
            return act(*given)

        return watched

    for hook in HOOKS:
        if getattr(type(part), hook) is not getattr(Part, hook):  # the base hook does nothing
            setattr(part, hook, watch(hook, getattr(part, hook)))
    return called


@pytest.mark.parametrize("expression", HOOKS_OF)
def test_a_run_calls_the_declared_hooks_of_a_part_and_no_others(expression: str) -> None:
    name = expression.partition("(")[0]
    model = "plain" if name in WITHOUT_INTEGERS else "norm"
    awaited = 9 if name in EVERYBODY else 5
    task = small_task(model, local_test=0.3)
    run, _ = federation(expression, task, awaited=awaited, rounds=3, personal_every=1)
    part = run.algorithm
    assert isinstance(part, Part)
    assert part.hooks() == HOOKS_OF[expression]
    called = calls_of(part)
    for _ in range(3):
        run.step()
    assert called == HOOKS_OF[expression]


def test_every_part_is_in_the_tables() -> None:
    """A new part needs its hooks here and, around methods, an entry in `seams.cases.PLACES`."""
    named = {expression.partition("(")[0] for expression in HOOKS_OF}
    assert named == {entry.name for entry in algorithms if issubclass(entry.make, Part)}
    around = {text.partition("(")[0] for text in WRAPPERS.values()}
    assert {entry.name for entry in algorithms if needs_method(entry)} - around <= {"gossip"}


# --- the facts and the messages of an algorithm ---


class Probe(FedAvg):
    """FedAvg with another client half, equal weights and facts from a test."""

    weighted: bool = False
    stated = Facts(anonymous=True)

    @property
    def facts(self) -> Facts:
        return self.stated

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return super().train(cohort, inbox)


class ProbeNoModel(Probe):
    """Sends its model under another name."""

    def send(self, round: Round) -> Message:
        return {"weights": self.state["model"].unsqueeze(0)}


class ProbeExtra(Probe):
    """Clients upload an additional number."""

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (self.plan.layout.size,), "extra": (1,)}


class ProbePart(Probe):
    """Clients receive and return the first 10 numbers of the model."""

    def send(self, round: Round) -> Message:
        return {"model": self.state["model"][:10].unsqueeze(0)}

    def expects(self, round: Round) -> Mapping[str, tuple[int, ...]]:
        return {"model": (10,)}


class ProbeAddressed(Probe):
    """Each client receives a separate number."""

    def send(self, round: Round) -> Message:
        return {**super().send(round), "own": torch.zeros(len(round.selected), 1)}


def probe(kind: type[Probe] = Probe, **facts: Any) -> type[Probe]:
    made = type(
        kind.__name__, (kind,), {"stated": replace(kind.stated, **facts), "__doc__": kind.__doc__}
    )
    assert issubclass(made, Probe)
    return made


ROBUST = [f"robust {rule}" for rule in ("median", "trimmed_mean", "krum", "multi_krum", "clipping")]
PRIVATE = ["private", "local_private", "dp_sgd"]
CODES = ["quantised", "quantised down", "sparse", "lowrank", "coded twice"]
STALE = ["fedbuff", "fedasync"]
UPDATES = ["fedvarp", "mifa", "fedstale", "cluster_fedvarp"]

SINGLE = "needs each reply, not only an estimate of their mean"
MORE = "does more than average whole models"
NOT_SENT = "do not receive one model"
NO_UPDATE = "do not return an update of one received model"
NOT_WHOLE = "do not exchange one whole model"
NOT_RETURNED = "do not return whole models"
EXTRA = "also upload 'extra', which would leak"

REFUSED: dict[str, tuple[type[Probe], dict[str, str]]] = {
    "no fact": (probe(), {}),
    "one_download=False": (
        probe(one_download=False),
        dict.fromkeys(["umf", "ala", "ala_code", "fedntd", "stages, auto", *UPDATES], NOT_SENT),
    ),
    "one_model_each=True": (
        probe(one_model_each=True),
        {
            **dict.fromkeys(
                ["private", "ema", "last"], "probe sends each client a different model"
            ),
            **dict.fromkeys(STALE, MORE),
        },
    ),
    "averages=False": (
        probe(averages=False),
        {**dict.fromkeys([*ROBUST, "private", *UPDATES], SINGLE), **dict.fromkeys(STALE, MORE)},
    ),
    "anonymous=False": (
        probe(anonymous=False),
        {"secure": "needs the client of each upload, which the exchange hides"},
    ),
    "fits_once=False": (
        probe(fits_once=False),
        {"dp_sgd": "clients of probe use their samples for more than one local training"},
    ),
    "fixed_participants=True": (probe(fixed_participants=True), {}),
    "stackable=False": (probe(stackable=False), {}),
    "needs_total_rounds=True": (probe(needs_total_rounds=True), {}),
    "needs_every_reply=True": (probe(needs_every_reply=True), {}),
    "deploys=memory": (probe(deploys="memory"), {}),
    "no model is sent": (
        probe(ProbeNoModel),
        {
            **dict.fromkeys(
                ["umf", "ala", "ala_code", "fedntd", "stages, auto", *UPDATES], NOT_SENT
            ),
            **dict.fromkeys(["clustered", "secure", "fisher_merge"], NOT_WHOLE),
            **dict.fromkeys([*PRIVATE, *CODES, "sign_flip", "norm_bound"], NO_UPDATE),
            **dict.fromkeys(STALE, MORE),
        },
    ),
    "another tensor is uploaded": (
        probe(ProbeExtra),
        {**dict.fromkeys([*PRIVATE, "secure"], EXTRA), **dict.fromkeys(STALE, MORE)},
    ),
    "a part of the model travels": (
        probe(ProbePart),
        {
            **dict.fromkeys(
                ["umf", "clustered", "secure", "stages, auto", "fisher_merge", *UPDATES], NOT_WHOLE
            ),
            "lowrank": NOT_RETURNED,
            **dict.fromkeys(STALE, MORE),
        },
    ),
    "a message is addressed": (
        probe(ProbeAddressed),
        {
            "umf": "receives a different 'own', which does not exist for idle clients",
            **dict.fromkeys(STALE, MORE),
        },
    ),
}
"""Probe algorithms, and the parts that refuse them, with words of the reason.

All other parts accept them.
"""

LOCAL = "fedmr, local"
"""An expression that accepts no part around an algorithm, only the client half of one."""

POISSON = ["clustered", "clustered by size", "power_of_choice", *STALE]


@contextmanager
def registered(kind: type[Probe]) -> Iterator[None]:
    algorithms.register("probe")(kind)
    try:
        yield
    finally:
        del algorithms._entries["probe"]


def refusal_of(expression: str, model: str = "plain", **options: Any) -> str:
    """Return the one-line reason why a federation is refused, or "" if it is accepted."""
    try:
        federation(expression, small_task(model), **{"awaited": 9} | options)
    except InvalidValue as error:
        assert "\n" not in str(error)  # noqa: PT017
        return str(error)
    return ""


@pytest.mark.parametrize("kind", REFUSED)
def test_parts_refuse_the_probes_of_the_table_and_no_others(kind: str) -> None:
    algorithm, refused = REFUSED[kind]
    with registered(algorithm):
        for name, text in WRAPPERS.items():
            if name == LOCAL:
                continue
            reason = refusal_of(text.format("probe"))
            assert bool(reason) == (name in refused), f"{name}: {reason or 'accepted'}"
            assert refused.get(name, "") in reason, f"{name}: {reason}"


@pytest.mark.parametrize("name", [name for name in WRAPPERS if name != LOCAL])
def test_parts_that_publish_uploads_refuse_batch_norm(name: str) -> None:
    with registered(probe()):
        reason = refusal_of(WRAPPERS[name].format("probe"), "norm")
    assert ("batch norm counts batches, and the counter would leak" in reason) == (name in PRIVATE)
    assert bool(reason) == (name in PRIVATE)


@pytest.mark.parametrize(
    ("options", "fact", "reason"),
    [
        (
            {"participation_mode": "poisson", "awaited": 4},
            "fixed_participants",
            "draws a different number of clients",
        ),
        (
            {"clock": Clock(speed=100.0, over_selection=0.5), "awaited": 4},
            "fixed_participants",
            "drops the last replies",
        ),
        (
            {"clock": Clock(speed=100.0, over_selection=0.5), "awaited": 4},
            "needs_every_reply",
            "another client replaces a missing one",
        ),
    ],
)
@pytest.mark.parametrize("name", ["none", "ala", "sparse", "robust median", "dp_sgd"])
def test_facts_decide_how_clients_may_take_part(
    options: dict[str, Any], fact: str, reason: str, name: str
) -> None:
    expression = WRAPPERS[name].format("probe")
    with registered(probe(**{fact: True})):
        assert reason in refusal_of(expression, **options)
    if name != "robust median" or "clock" in options:  # it needs enough replies in each round
        with registered(probe()):
            assert not refusal_of(expression, **options)


@pytest.mark.parametrize("name", POISSON)
def test_samplers_refuse_clients_that_take_part_by_chance(name: str) -> None:
    assert refusal_of(WRAPPERS[name].format("fedavg"), participation_mode="poisson", awaited=4)


@pytest.mark.parametrize(
    "name", [name for name in WRAPPERS if name != LOCAL and "stages" not in name]
)
def test_facts_of_the_algorithm_hold_for_the_pipeline(name: str) -> None:
    def pipeline_of(**facts: Any) -> Any:
        with registered(probe(**facts)):
            run, _ = federation(WRAPPERS[name].format("probe"), awaited=9)
        return run.pipeline, run.algorithm

    plain, method = pipeline_of()
    assert needs_total_rounds(method) == (name in ("umf", "fisher_merge"))
    assert plain.personal == (name in ("ala", "ala_code"))
    assert (plain.unstackable is None) == (name != "dp_sgd")
    assert plain.waits == (name in STALE)
    pipeline, method = pipeline_of(needs_total_rounds=True, stackable=False, deploys="memory")
    assert needs_total_rounds(method)
    assert pipeline.unstackable is not None
    assert pipeline.personal


# --- combinations of parts ---

ONCE = "is allowed only once"
SAMPLERS = "already selects the clients"
NAMES = "needs the client of each upload, which the exchange hides"
CLOSING = "no other part may change the clients of a round"
RELEASE = "would change the replies before the sum or after the release"
LAYERS = "upload layers of other clients instead of updates"
EPSILON = "counts a separate epsilon"
POLLED = "clients would return losses without the privacy"
REVEALED = "clients would upload their Fisher information without the privacy of"
EVEN = "fedavg(weighted=false)"

PAIRS: dict[str, str] = {
    "umf(ala(umf(fedavg)))": ONCE,
    "ala(fedala)": ONCE,
    "sparse(umf(sparse(fedavg)))": ONCE,
    "clustered(clusamp)": ONCE,
    "power_of_choice(power_of_choice(fedavg))": ONCE,
    "fedbuff(fedbuff(fedavg, k=2), k=2)": ONCE,
    "clustered(power_of_choice(fedavg))": SAMPLERS,
    "power_of_choice(clustered(fedavg, by=size))": SAMPLERS,
    "fedbuff(clustered(fedavg), k=3)": SAMPLERS,
    "clustered(fedasync(fedavg))": SAMPLERS,
    "umf(fedbuff(fedavg, k=3))": CLOSING,
    "fedbuff(umf(fedavg), k=3)": CLOSING,
    "robust(fedbuff(fedavg, k=3))": CLOSING,
    f"secure(fedbuff({EVEN}, k=3))": CLOSING,
    "fedbuff(private(fedavg, noise=1.0), k=3)": CLOSING,
    "stages(fedbuff(fedavg, k=3):1, fedavg)": "it cannot be inside or around stages",
    "fedasync(stages(fedavg:1, fedprox))": "it cannot be inside or around stages",
    "sparse(quantised(fedavg))": "already codes uploads. Only quantised can be around it",
    "lowrank(sparse(fedavg))": "already codes uploads. Only quantised can be around it",
    "lowrank(umf(quantised(fedavg)))": "already codes uploads. Only quantised can be around it",
    "quantised(secure(fedmr))": LAYERS,
    "secure(sparse(fedmr))": LAYERS,
    f"secure(robust({EVEN}, rule=krum))": NAMES,
    f"robust(secure({EVEN}), rule=clipping)": NAMES,
    f"clustered(secure({EVEN}))": NAMES,
    f"secure(stages({EVEN}:auto, fedmr))": NAMES,
    "private(local_private(fedavg, noise=1.0), noise=1.0)": EPSILON,
    "dp_sgd(ala(private(fedavg, noise=1.0)), noise=1.0)": EPSILON,
    "local_private(dp_sgd(fedavg, noise=1.0), noise=1.0)": EPSILON,
    "power_of_choice(dp_sgd(fedavg, noise=1.0))": POLLED,
    "local_private(power_of_choice(fedavg), noise=1.0)": POLLED,
    "fisher_merge(dp_sgd(fedavg, noise=1.0))": REVEALED,
    "fisher_merge(local_private(fedmr, noise=1.0))": REVEALED,
    "private(fisher_merge(fedavg), noise=1.0)": REVEALED,
    f"private(secure({EVEN}), noise=1.0)": "an upload contains unclipped layers of several clients",
    "private(clustered(fedavg, by=size), noise=1.0)": "which epsilon does not count",
    "robust(private(fedavg, noise=1.0))": RELEASE,
    "norm_bound(private(fedavg, noise=1.0), radius=1.0)": RELEASE,
    "stages(private(fedavg, noise=1.0):1, fedavg)": "the other stages would have no privacy",
    "stages(fedavg:1, dp_sgd(fedavg, noise=1.0))": "the other stages would have no privacy",
    "dp_sgd(ala(fedavg), noise=1.0)": "clients of ala use their samples for more",
    "fedlc(dp_sgd(fedavg, noise=1.0))": "clients of fedlc use their samples for more",
    "feddecorr(dp_sgd(fedavg, noise=1.0))": "clients of feddecorr use their samples for more",
    "secure(stages(fedmr:1, fedmr(unit=tensor)))": "move different units",
}
"""Refused expressions of several parts, with words of the reason."""


@pytest.mark.parametrize("expression", PAIRS)
def test_parts_that_do_not_fit_each_other_are_refused(expression: str) -> None:
    reason = refusal_of(expression)
    assert re.search(re.escape(PAIRS[expression]), reason), reason or "accepted"


EQUAL = [
    ("ala(sparse(fedavg, share=0.5))", "sparse(ala(fedavg), share=0.5)"),
    ("robust(quantised(fedavg, down=8))", "quantised(robust(fedavg), down=8)"),
    ("clustered(umf(fedavg))", "umf(clustered(fedavg))"),
    ("power_of_choice(umf(fedavg))", "umf(power_of_choice(fedavg))"),
    ("ala(local_private(fedavg, noise=0.3))", "local_private(ala(fedavg), noise=0.3)"),
    (
        "local_private(lowrank(fedavg, rank=1), noise=0.3)",
        "lowrank(local_private(fedavg, noise=0.3), rank=1)",
    ),
    (f"robust(secure({EVEN}), rule=median)", f"secure(robust({EVEN}, rule=median))"),
    ("quantised(fedbuff(fedavg, k=3))", "fedbuff(quantised(fedavg), k=3)"),
    (
        "private(sparse(fedavg, share=0.5), noise=0.3)",
        "sparse(private(fedavg, noise=0.3), share=0.5)",
    ),
    ("sign_flip(local_private(fedavg, noise=0.3))", "local_private(sign_flip(fedavg), noise=0.3)"),
]
"""Expressions with equal meaning, because parts act in the order of a round."""


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_parts_sort_into_places(one: str, other: str) -> None:
    models: list[Tensor] = []
    figures = []
    for expression in (one, other):
        run, _ = federation(expression, awaited=9 if "private(" in expression else 5)
        for _ in range(3):
            run.step()
        models.append(run.model())
        figures.append([{**record, "diagnosis": None} for record in run.history])
    assert torch.equal(*models)
    assert figures[0] == figures[1]


def test_an_estimate_hides_whose_an_upload_is() -> None:
    """The median does not depend on the owner of a layer, but the mean of fedavg would."""
    assert not refusal_of("secure(robust(fedavg, rule=median))")
