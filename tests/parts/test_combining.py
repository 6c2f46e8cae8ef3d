"""Check `fedloom list X --with Y` and the description of the steps of a round."""

from __future__ import annotations

from itertools import permutations

import pytest

from fedloom.algorithm.method import algorithms
from fedloom.cli import main
from fedloom.parts.building import build
from fedloom.parts.combining import combinations
from fedloom.parts.hooks import HOOKS, Part, parts_of
from fedloom.parts.moments import MOMENTS, moments_of, parts_by_hook

PARTS = (
    "ala",
    "clustered",
    "private",
    "quantised",
    "robust(rule=median)",
    "secure",
    "sparse(share=0.1)",
    "stages",
    "umf",
)


def shown(first: str, second: str) -> dict[str, str]:
    """Return the reason against each expression of two methods, or ""."""
    return {
        combination.expression: combination.reason for combination in combinations(first, second)
    }


@pytest.mark.parametrize(
    ("first", "second", "expressions"),
    [
        ("fedmr", "umf", ["umf(fedmr)"]),
        ("umf", "fedmr", ["umf(fedmr)"]),
        ("umf", "sparse", ["sparse(umf(fedavg))", "umf(sparse(fedavg))"]),
        ("quantised(fedprox, bits=4)", "umf", ["umf(quantised(fedprox, bits=4))", "quantised(umf(fedprox), bits=4)"]),
        ("umf(method=fedprox)", "ala", ["ala(umf(method=fedprox))", "umf(method=ala(fedprox))"]),
        ("fedala", "umf", ["umf(fedala)"]),
        ("fedavg", "scaffold", ["stages(fedavg:10, scaffold)", "stages(scaffold:10, fedavg)"]),
        ("secure", "robust(rule=median)", [
            "robust(secure(fedavg(weighted=false)), rule=median)", "secure(robust(fedavg, "
                                                                   "rule=median))",
        ]),
        ("stages", "umf", ["umf(stages(fedavg:10, fedavg))", "stages(umf(fedavg):10, fedavg)"]),
        ("fedbn", "umf", ["umf(fedbn)"]),
        ("gossip", "ala", ["ala(gossip(fedavg))", "gossip(ala(fedavg))"]),
    ],
)  # fmt: skip
def test_each_order_of_two_methods_is_shown(
    first: str, second: str, expressions: list[str]
) -> None:
    assert list(shown(first, second)) == expressions


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            "fedmr",
            "robust",
            "robust: fedmr needs each reply, not only an estimate of their mean",
        ),
        (
            "scaffold",
            "private",
            "private: clients of scaffold also upload 'variate', which would leak; "
            "use local_private, in which each client adds noise",
        ),
        (
            "fedproto",
            "sparse",
            "sparse: clients of fedproto do not return an update of one received model",
        ),
        ("sparse", "sparse", "sparse(sparse(fedavg)): sparse is allowed only once"),
    ],
)
def test_a_refusal_gives_its_reason_in_one_line(first: str, second: str, reason: str) -> None:
    """A refusal gives its reason in one line; the second and third case need a plan."""
    assert list(shown(first, second).values()) == [reason]


@pytest.mark.parametrize(("first", "second"), list(permutations(PARTS, 2)))
def test_what_is_shown_is_what_build_accepts(first: str, second: str) -> None:
    for combination in combinations(first, second):
        if not combination.reason:
            parts = list(parts_of(build(combination.expression)))
            acting = [moments for part in parts if (moments := moments_of(part))]
            assert len(parts) == 2
            assert all(moments in acting for moments in combination.moments.values())


def test_the_command_prints_orders_moments_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "umf", "--with", "sparse"]) == 0
    assert capsys.readouterr().out == (
        "sparse(umf(fedavg)): accepted\n    sparse  upload\n    umf     selection, local training\n"
        "umf(sparse(fedavg)): accepted\n    umf     selection, local training\n    sparse  upload\n"
    )
    assert main(["list", "fedmr", "--with", "robust"]) == 0
    assert capsys.readouterr().out == (
        "robust(fedmr): refused\n    robust: fedmr needs each reply, not only an estimate of "
        "their mean\n"
    )


def test_every_hook_has_one_moment() -> None:
    assert sorted(name for moment in MOMENTS for name in moment.hooks) == sorted(HOOKS)
    assert len({moment.name for moment in MOMENTS}) == len(MOMENTS)


def test_the_parts_of_a_hook_are_those_that_declare_it() -> None:
    """The parts of a hook are all parts that declare it, with options that activate all their
    hooks.
    """
    options = {
        "clustered": "clustered(fedavg)", "fedala": "fedala", "fedala_code": "fedala_code",
        "fedah": "fedah", "clusamp": "clusamp",
        "ca2fl": "ca2fl", "fedlaavg": "fedlaavg",
        "fedmr_async": "fedmr_async", "private": "private(fedavg, noise=1)", "dp_sgd": "dp_sgd(fedavg, noise=1)",
        "local_private": "local_private(fedavg, noise=1)", "quantised": "quantised(fedavg, down=8)",
        "norm_bound": "norm_bound(fedavg, radius=1)", "secure": "secure(fedmr)", "stages": "stages(fedavg:auto, fedavg)",
    }  # fmt: skip
    by_hook = parts_by_hook()
    for entry in algorithms:
        if issubclass(entry.make, Part) and entry.make.__module__.startswith("fedloom."):
            part = build(options.get(entry.name, f"{entry.name}(fedavg)"))
            assert isinstance(part, Part)
            able = {hook for hook, names in by_hook.items() if entry.name in names}
            either = {"poll", "observe"} if entry.name == "power_of_choice" else set()
            moved = {"move"} if entry.name == "secure" else set()
            assert part.hooks() <= able
            assert able - part.hooks() <= either | moved, entry.name
