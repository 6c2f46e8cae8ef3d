"""Every wrapper against every capability of a method: what the wrapper says of itself, or hands on from the method inside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from fedloom.algorithm import CAPABILITIES, Algorithm, algorithms
from fedloom.algorithms.fedavg import FedAvg
from fedloom.errors import InvalidValue
from fedloom.exchange import Message, Plan
from fedloom.local.cohort import Cohort
from fedloom.parts.building import build
from seams.cases import WRAPPERS
from seams.setting import small_task

CODED = {"averages": False}
WAITING = {"fixed_participants": True, "asynchronous": True, "foreseeable": False}
OWN: dict[str, dict[str, bool]] = {
    "umf": {"needs_total_rounds": True},
    "ala": {"fits_once": False},
    "clustered": {"fixed_participants": True, "averages": False, "anonymous_replies": False, "foreseeable": False},
    "clustered by size": {"fixed_participants": True, "averages": False},
    "robust median": {"anonymous_replies": True},
    "robust trimmed_mean": {"anonymous_replies": True},
    "robust krum": {"anonymous_replies": False},
    "robust multi_krum": {"anonymous_replies": False},
    "robust clipping": {"anonymous_replies": False},
    "private": {"needs_every_reply": True, "updates_without_replies": True},
    "dp_sgd": {"stackable": False},
    "quantised": CODED,
    "quantised down": CODED,
    "sparse": CODED,
    "lowrank": CODED,
    "coded twice": CODED,
    # Beside fedavg, which asks for weights; what is said of a round is that of the stage in progress.
    "stages, first": {"anonymous_replies": False},
    "stages, later": {"anonymous_replies": False, "one_model_each": False, "updates_without_replies": False},
    "stages, auto": {"anonymous_replies": False, "scheduled": False, "foreseeable": False},
    "fedbuff": WAITING,
    "fedasync": WAITING,
    "fedlc": {"fits_once": False},
    "feddecorr": {"fits_once": False},
    "power_of_choice": {"foreseeable": False},
    "fedmr, local": {
        "one_model_each": True, "fixed_participants": True, "averages": False, "anonymous_replies": True,
    },
}  # fmt: skip
"""What a wrapper says of itself, whatever it wraps: all else is the inner method's, by the rule of `CAPABILITIES`."""


@dataclass
class Probe(FedAvg):
    """FedAvg with equal weights, a client half of its own and one capability set."""

    weighted: bool = False

    def train(self, cohort: Cohort, inbox: Message) -> Message:
        return super().train(cohort, inbox)


@pytest.fixture(scope="module", params=CAPABILITIES)
def probes(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str]]]:
    """A capability, and the names of methods that have it and that do not, which are registered while the tests run."""
    names = []
    for value in (False, True):
        name = f"probe_{request.param}_{value}".lower()
        kind = type("Probe", (Probe,), {request.param: value, "__doc__": Probe.__doc__})
        algorithms.register(name)(kind)
        names.append(name)
    yield request.param, names
    for name in names:
        del algorithms._entries[name]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_capability_is_the_wrappers_own_or_that_of_the_method_inside(
    wrapper: str, probes: tuple[str, list[str]]
) -> None:
    """A wrapper may refuse a method for one value of the capability, but not for both."""
    capability, names = probes
    task, taken = small_task(), 0
    for value, name in zip((False, True), names, strict=True):
        try:
            method: Algorithm = build(WRAPPERS[wrapper].format(name))
            method.setup(Plan(task.layout, task.initial, 9, 9, 4, 0, 3, task.sizes, task.model))
        except InvalidValue as error:
            assert "\n" not in str(error)  # noqa: PT017
            continue
        assert getattr(method, capability) == OWN.get(wrapper, {}).get(capability, value)
        taken += 1
    assert taken
