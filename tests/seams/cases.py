"""Factors of the harness: methods, parts, attendance, model and resumption."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fedloom.algorithm.method import Method, algorithms
from fedloom.common.errors import InvalidValue
from fedloom.common.registry import RegistryEntry
from fedloom.rounds.clock import Clock
from fedloom.task import Task
from seams.setting import Change, LossyEngine, federation, proof_of, small_task

PARAMETERS = {
    "pfedme": "pfedme(regularisation=1.0, beta=0.5)",
    "fedgen": "fedgen(generator_steps=2, generator_batch=4, noise=2, hidden=4)",
    "fedmr_async": "fedmr_async(k=3)",
    "ca2fl": "ca2fl(k=3)",
    "fedadagrad": "fedadagrad(learning_rate=0.01)",
    "cluster_fedvarp": "cluster_fedvarp(clusters=2)",
}
"""Parameters of methods with defaults for larger federations."""

VARIANTS = (
    "fedavg(weighted=false)", "fedmr(blend=0.3)", "fedmr(blend=auto, tolerance=0.05)", "scaffold(server_learning_rate=0.5)",
)  # fmt: skip

NESTED = (
    "umf(fedmut)", "ala(fedavg)", "clustered(fedavg, by=size)", "robust(fedavg, rule=median)", "robust(scaffold, rule=clipping)",
    "private(fedavg, clip=0.5, noise=0.3)", "local_private(fedmr, clip=0.5, noise=0.3)", "dp_sgd(fedavg, noise=0.3)",
    "quantised(fedavg, bits=4)", "secure(fedmr)", "stages(scaffold:1, fedmr)", "stages(fedavg:auto, fedmut, patience=1)",
    "fedbuff(fedavg, k=3)",
)  # fmt: skip

PLACES = {
    "none": {"none": "{}"},
    "selection": {
        "umf": "umf({})",
        "clustered": "clustered({})",
        "clustered by size": "clustered({}, by=size)",
        "power_of_choice": "power_of_choice({})",
        "longest_idle": "longest_idle({})",
    },
    "training": {
        "ala": "ala({})",
        "ala_code": "ala_code({})",
        "fedntd": "fedntd({})",
        "fedlc": "fedlc({})",
        "feddecorr": "feddecorr({})",
        "dp_sgd": "dp_sgd({}, noise=0.3)",
        "partial_work": "partial_work({})",
        "fedmr, local": "fedmr(local={})",
    },
    "attacks": {"sign_flip": "sign_flip({}, share=0.3)"},
    "noise": {"local_private": "local_private({}, clip=0.5, noise=0.3)"},
    "codes": {
        "quantised": "quantised({}, bits=4, bucket=8)",
        "quantised down": "quantised({}, down=8)",
        "sparse": "sparse({}, share=0.3)",
        "lowrank": "lowrank({}, rank=1)",
        "coded twice": "quantised(sparse({}, share=0.5), down=4)",
    },
    "exchanges": {"secure": "secure({})"},
    "arrivals": {"fedbuff": "fedbuff({}, k=3)", "fedasync": "fedasync({})"},
    "estimates": {
        "robust median": "robust({}, rule=median)",
        "robust trimmed_mean": "robust({})",
        "robust krum": "robust({}, rule=krum)",
        "robust multi_krum": "robust({}, rule=multi_krum)",
        "robust clipping": "robust({}, rule=clipping)",
        "norm_bound": "norm_bound({}, radius=0.1)",
        "private": "private({}, clip=0.5, noise=0.3)",
    },
    "stale updates": {
        "fedvarp": "fedvarp({})",
        "mifa": "mifa({})",
        "fedstale": "fedstale({})",
        "cluster_fedvarp": "cluster_fedvarp({}, clusters=2)",
    },
    "merging": {"fisher_merge": "fisher_merge({})"},
    "server averages": {"ema": "ema({})", "last": "last({}, n=2)"},
    "stages": {
        "stages, first": "stages({}:1, fedavg)",
        "stages, later": "stages(fedavg:1, {})",
        "stages, auto": "stages({}:auto, fedavg, patience=1, improvement=0.9)",
    },
}
"""Parts as expressions around a method, grouped by their stage in a round.

A new part needs a line here. A new algorithm needs no entry.
"""

WRAPPERS = {name: text for parts in PLACES.values() for name, text in parts.items()}
"""Each part as an expression around a method."""

ATTENDANCES = ("all", "dropout", "clock", "deadline", "not finite", "nobody", "one", "poisson")
MODELS = ("plain", "norm", "frozen", "float32")
COURSES = ("straight", "resumed")

ROUNDS = 3
EVERYBODY = ("fedamp", "apple", "afl", "cfl", "private(")
"""Methods that need all clients in each round or Poisson sampling."""


def needs_method(entry: RegistryEntry[type[Method]]) -> bool:
    """Return True for a part that requires another method as an argument."""
    given = {"method", "stages"} & entry.parameters.keys()
    return any(entry.parameters[name].default is inspect.Parameter.empty for name in given)


@cache
def methods() -> list[str]:
    """Return all registered methods without inner methods, variants, and parts around methods."""
    single = sorted(
        PARAMETERS.get(entry.name, entry.name) for entry in algorithms if not needs_method(entry)
    )
    return [*single, *VARIANTS, *NESTED]


@dataclass(frozen=True)
class Case:
    """A federation in the harness."""

    method: str
    wrapper: str
    attendance: str
    model: str
    course: str

    @property
    def expression(self) -> str:
        return WRAPPERS[self.wrapper].format(self.method)

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in FACTORS)

    def options(self) -> dict[str, Any]:
        """Return the arguments of `federation`."""
        awaited = 9 if any(name in self.expression for name in EVERYBODY) else 5
        options: dict[str, Any] = {"awaited": awaited, "rounds": ROUNDS}
        if self.attendance == "dropout":
            options["dropout"] = 0.4
        elif self.attendance == "clock":
            options["clock"] = Clock(speed="stragglers(100, 10)", deadline=0.5, over_selection=0.4)
        elif self.attendance == "deadline":
            options["clock"] = Clock(speed="stragglers(100, 10)", deadline=0.3)
        elif self.attendance == "one":
            options["awaited"] = 1
        elif self.attendance == "poisson":
            options |= {"awaited": 2, "participation_mode": "poisson"}
        return options

    @property
    def change(self) -> Change | None:
        return not_finite if self.attendance == "not finite" else None


FACTORS: Mapping[str, Sequence[str]] = {
    "method": methods(),
    "wrapper": list(WRAPPERS),
    "attendance": ATTENDANCES,
    "model": MODELS,
    "course": COURSES,
}


def not_finite(number: int, client: int, reply: dict[str, Any]) -> dict[str, Any]:
    """In round 2, put a non-finite number into the uploads of a third of the clients."""
    if number != 2 or client % 3:
        return reply
    name = next(name for name, rows in reply.items() if rows.is_floating_point())
    changed = reply[name].clone()
    changed.reshape(-1)[0] = float("nan")
    return {**reply, name: changed}


@cache
def task_and_engine(model: str) -> tuple[Task, LossyEngine]:
    """Return a shared task and engine for all set-ups with one model.

    Creating them takes most of the time of a set-up.
    """
    task = small_task(model)
    return task, LossyEngine(task, proof_of(task))


@cache
def refusal(case: Case) -> str:
    """Return the reason why the case is refused at set-up, or "" if it is accepted."""
    if case.course != COURSES[0]:
        return refusal(replace(case, course=COURSES[0]))
    try:
        task, engine = task_and_engine(case.model)
        federation(case.expression, task, engine=engine, change=case.change, **case.options())
    except InvalidValue as error:
        assert "\n" not in str(error), f"{case.expression} is refused in several lines"  # noqa: PT017
        return str(error)
    return ""


@cache
def pair_refusal(method: str, wrapper: str) -> str:
    """Return the reason why a wrapper refuses a method with each model and attendance.

    Returns "" if the wrapper accepts the method.
    """
    reasons = []
    for model, attendance in itertools.product(("norm", "plain"), ("all", "poisson")):
        reason = refusal(Case(method, wrapper, attendance, model, COURSES[0]))
        if not reason:
            return ""
        reasons.append(reason)
    # The reason with all clients, for the plain model or, with FedBN, for batch norm.
    return reasons[0 if "fedbn" in method else 2]


def every_case(seed: int, only: str = "") -> Iterator[Case]:
    """Yield all accepted cases with `only` in their expression, shuffled with the seed."""
    cases = [Case(*values) for values in itertools.product(*FACTORS.values())]
    cases = [case for case in cases if only in case.expression]
    random.Random(seed).shuffle(cases)
    for case in cases:
        if not pair_refusal(case.method, case.wrapper) and not refusal(case):
            yield case


def covering_cases(method: str, only: str = "") -> list[Case]:
    """Return a case of the method with each wrapper that accepts it.

    Attendance, model and course rotate over methods and wrappers. Additional cases cover the
    remaining values of these factors.
    """
    begin, cases = methods().index(method), list[Case]()
    for number, wrapper in enumerate(WRAPPERS, start=begin):
        for turn in range(3):
            attendance = ATTENDANCES[(number + turn) % len(ATTENDANCES)]
            model = MODELS[(number // len(ATTENDANCES) + number + turn) % len(MODELS)]
            course = COURSES[(number // 2 + begin) % len(COURSES)]
            case = Case(method, wrapper, attendance, model, course)
            if not refusal(case):
                cases.append(case)
                break
        else:
            if not pair_refusal(method, wrapper):
                cases += accepted_case(method=method, wrapper=wrapper)
    for factor, values in FACTORS.items():
        for value in set(values).difference(getattr(case, factor) for case in cases):
            if factor not in ("method", "wrapper"):
                cases += accepted_case(method=method, **{factor: value})
    return [case for case in cases if only in case.expression]


def rare_cases() -> list[Case]:
    """Return cases for pairs of factor values that the rotation does not cover.

    With these cases, each pair occurs that at least one federation accepts.
    """
    covered = {
        pair for method in methods() for case in covering_cases(method) for pair in pairs_of(case)
    }
    cases: list[Case] = []
    for factor, second_factor in itertools.combinations(FACTORS, 2):
        for value, second_value in itertools.product(FACTORS[factor], FACTORS[second_factor]):
            if (factor, value, second_factor, second_value) in covered or (
                second_factor == "wrapper" and pair_refusal(value, second_value)
            ):
                continue
            for case in accepted_case(**{factor: value, second_factor: second_value}):
                cases.append(case)
                covered |= pairs_of(case)
    return cases


def accepted_case(**fixed: str) -> list[Case]:
    """Return the first accepted case with these values in a list, or an empty list."""
    every = (
        Case(*values)
        for values in itertools.product(
            *({**FACTORS, **{k: (v,) for k, v in fixed.items()}}).values()
        )
    )
    return [*itertools.islice((case for case in every if not refusal(case)), 1)]


def pairs_of(case: Case) -> frozenset[tuple[str, str, str, str]]:
    """Return the pairs of two factor values that occur in a case."""
    named = list(zip(FACTORS, case.values, strict=True))
    return frozenset((*a, *b) for a, b in itertools.combinations(named, 2))
