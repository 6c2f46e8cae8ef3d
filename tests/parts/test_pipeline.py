"""Parts in a pipeline.

Tests refused combinations that would leak data, checkpoints of stages and the hooks of parts.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom.parts
from every_method import PRIVATE, WRAPPERS
from fedloom.algorithm import Algorithm, Facts, algorithms, is_personal
from fedloom.algorithms.fedavg import FedAvg
from fedloom.common.errors import CheckpointError, InvalidValue
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.hooks import HOOKS, Part
from fedloom.parts.pipeline import Pipeline
from fedloom.rounds.checkpoint import Checkpoint, Checkpoints
from fedloom.rounds.engine import Job
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.state.released import CUT_SHORT, Release, ReleaseLedger
from kill_support import Killed
from private_support import federation as private_federation
from released_support import interrupted, sites
from small_task import small_task

# --- combinations that would leak ---


@pytest.mark.parametrize("part", ["private", "local_private", "dp_sgd"])
@pytest.mark.parametrize(
    "inside", ["{}(power_of_choice(fedavg), noise=1.0)", "power_of_choice({}(fedavg, noise=1.0))"]
)
def test_no_part_polls_clients_beside_the_privacy_of_another_one(inside: str, part: str) -> None:
    """A part with a poll is refused, because losses would bypass clipping and noise."""
    with pytest.raises(
        InvalidValue, match="clients would return losses without the privacy"
    ) as caught:
        build(inside.format(part))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["private", "local_private", "dp_sgd"])
def test_no_part_polls_clients_in_a_later_stage_inside_privacy(part: str) -> None:
    with pytest.raises(InvalidValue, match="clients would return losses without the privacy"):
        build(f"{part}(stages(fedavg:1, power_of_choice(fedavg)), noise=1.0)")


@pytest.mark.parametrize("part", ["local_private", "dp_sgd"])
def test_privacy_leaves_no_loss_to_choose_clients_by(part: str) -> None:
    """Without a poll, the part needs training losses, and private clients do not report them."""
    run = private_federation(f"{part}(power_of_choice(fedavg, ask=false), noise=1.0)", mode="fixed")
    run.run()
    assert bool(run.server_state()["inner0.losses"].isinf().all())


@pytest.mark.parametrize("part", ["private", "local_private", "dp_sgd"])
@pytest.mark.parametrize("later", ["scaffold", "fedavg:2, scaffold", "umf(scaffold)"])
def test_a_later_stage_that_uploads_more_than_the_model_is_refused_at_set_up(
    part: str, later: str
) -> None:
    with pytest.raises(
        InvalidValue, match=rf"^{part}: .*scaffold.* also upload 'variate'"
    ) as caught:
        private_federation(f"{part}(stages(fedavg:1, {later}), noise=1.0)")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["private", "local_private"])
def test_the_loss_that_ends_a_stage_is_no_private_upload(part: str) -> None:
    with pytest.raises(InvalidValue, match="also upload '@held_out_loss', which would leak"):
        private_federation(f"{part}(stages(fedavg:auto, fedavgm), noise=1.0)")


@pytest.mark.parametrize("part", ["private", "local_private", "dp_sgd"])
@pytest.mark.parametrize(
    "expression",
    [
        "stages({}:1, fedavg)",
        "stages(fedavg:1, {})",
        "stages({0}:1, {0})",
        "umf(stages(fedavg:1, {}))",
        "stages(fedavg:1, stages({}:2, fedavg))",
    ],
)
def test_privacy_of_one_stage_only_is_refused(expression: str, part: str) -> None:
    remedy = f"Put {part} around stages"
    with pytest.raises(
        InvalidValue, match=rf"^{part}: the other stages would have no privacy\. {remedy}$"
    ):
        build(expression.format(f"{part}(fedavg, noise=1.0)"))


@pytest.mark.parametrize(
    "expression",
    [
        "robust(secure(fedavg(weighted=false)), rule=krum)",
        "robust(secure(fedavg(weighted=false)), rule=multi_krum)",
        "robust(secure(fedavg(weighted=false)), rule=clipping)",
        "secure(robust(fedavg(weighted=false), rule=krum))",
        "secure(robust(fedavg(weighted=false), rule=clipping))",
        "norm_bound(secure(fedavg(weighted=false)), radius=1.0)",
        "clustered(secure(fedmr))",
        "secure(clustered(fedmr))",
    ],
)
def test_no_part_tells_apart_uploads_that_the_exchange_has_mixed(expression: str) -> None:
    """A mixed upload has layers of several clients, so its length and distances are meaningless."""
    with pytest.raises(
        InvalidValue, match=r"^secure: .* needs the client of each upload"
    ) as caught:
        build(expression)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    ["robust(secure(fedavg(weighted=false)), rule=median)", "clustered(secure(fedmr), by=size)"],
)
def test_parts_that_read_no_single_upload_go_around_the_exchange(expression: str) -> None:
    assert str(build(expression))


# --- the ledger ---


def test_a_ledger_refuses_releases_of_unknown_methods(tmp_path: Path) -> None:
    ledger = ReleaseLedger(tmp_path / "released.jsonl", "this run")
    ledger.resume(0)
    ledger.append(Release(1, "0.private", 1.0, 1.0))
    ledger.require_methods({"0.private", "1.dp_sgd"})
    with pytest.raises(
        CheckpointError, match=r"releases of '0\.private', but this run does not use it"
    ) as caught:
        ledger.require_methods({"1.private"})
    assert "\n" not in str(caught.value)
    ledger.append(Release(2, CUT_SHORT, 0.0, 0.0))
    ledger.require_methods({"0.private"})


def test_a_run_refuses_the_ledger_of_another_expression(tmp_path: Path) -> None:
    interrupted("local_private(fedavg, noise=1.0)", tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"counts releases of '0\.local_private'"):
        sites("quantised(local_private(fedavg, noise=1.0))", tmp_path / "run")


# --- stages and their checkpoints ---


class Mortal(RowsEngine):
    """A rows engine in a process that is killed in the middle of a round."""

    last_round = 0

    def train(self, pipeline: Pipeline, round: Round, jobs: Sequence[Job]) -> Iterator[Any]:
        for result in super().train(pipeline, round, jobs):
            yield result
            if round.number == self.last_round:
                raise Killed


def staged(expression: str, directory: Path, killed_in: int = 0, rounds: int = 7) -> Federation:
    task = small_task()
    engine = Mortal(task)
    engine.last_round = killed_in
    directory.mkdir(exist_ok=True)
    schedule = Schedule(
        rounds=rounds,
        participation=0.5,
        seed=3,
        evaluate_every=1,
        personal_every=2,
        checkpoint_every=1,
    )
    return Federation(build(expression), task, engine, schedule, directory)


def saved(directory: Path, number: int) -> Checkpoint:
    """Return the newest checkpoint and assert its round."""

    def adopt(checkpoint: Checkpoint) -> None:
        assert checkpoint.round == number

    checkpoint = Checkpoints(directory, "").latest(number, adopt)
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("outside", ["{}", "umf({})"])
def test_checkpoints_hold_no_pool_of_a_stage_that_has_not_begun_or_has_ended(
    outside: str, tmp_path: Path
) -> None:
    run = staged(outside.format("stages(fedmr:2, fedavg:4, fedmr(unit=tensor))"), tmp_path)
    size, participants = run.task.layout.size, 3
    path = "" if outside == "{}" else "inner0."
    assert [name for name in run.server_state() if name.endswith("pool")] == [f"{path}inner0.pool"]
    for number in range(1, 7):
        run.step()
        run.save()
        state = saved(tmp_path, number).server
        leading = 0 if number < 2 else 1 if number < 4 else 2  # in the next round
        stage = f"{path}inner{leading}."
        others = [
            name for name in state if name.startswith(f"{path}inner") and not name.startswith(stage)
        ]
        assert others == []
        assert {name: tensor.shape for name, tensor in state.items() if name.endswith("pool")} == (
            {} if leading == 1 else {f"{stage}pool": (participants, size)}
        )
        initial = [f"{path}initial"] if leading else []  # the initial model of the stage
        assert [name for name in state if name.endswith("initial")] == initial
        of_stages = [state[name] for name in state if name.startswith(stage) or name in initial]
        models = 1 if leading == 1 else participants
        assert sum(tensor.numel() for tensor in of_stages) == (models + len(initial)) * size


@pytest.mark.parametrize(
    ("expression", "killed_in"),
    [
        ("stages(fedavg:2, fedmr)", 3),  # the first round of the later stage
        ("stages(fedavg:2, fedmr:4, scaffold)", 6),
        ("stages(fedmr:2, ala(fedavg, max_epochs=2))", 5),
        ("umf(stages(scaffold:3, fedmr))", 5),
        ("stages(fedavg:1, stages(moon:3, fedmr):5, fedadam)", 5),
        ("sparse(stages(fedavg:2, clustered(fedmut):5, fedavgm), share=0.2)", 7),
        ("stages(fedavg:auto, fedmr, patience=1, improvement=1.0)", 5),
        ("stages(fedavg:2, secure(fedmr))", 4),
    ],
)
def test_a_run_killed_inside_a_later_stage_resumes_to_the_same_bytes(
    expression: str, killed_in: int, tmp_path: Path
) -> None:
    whole = staged(expression, tmp_path / "whole")
    whole.run()
    killed = staged(expression, tmp_path / "killed", killed_in)
    with pytest.raises(Killed):
        killed.run()
    resumed = staged(expression, tmp_path / "killed")
    assert resumed.finished == killed_in - 1
    stages = [
        int(tensor) for name, tensor in resumed.server_state().items() if name.endswith("stage")
    ]
    assert max(stages) > 0
    resumed.run()
    state, expected = resumed.server_state(), whole.server_state()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    names = {path.name for path in (tmp_path / "whole").glob("*") if path.is_file()} - {
        "timings.jsonl"
    }
    assert any(name.startswith("checkpoint-") for name in names)
    assert "metrics.jsonl" in names
    for name in names:
        assert (tmp_path / "killed" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes(), name


# --- hooks of parts ---


def part_classes() -> list[type[Part]]:
    """Return the parts of fedloom, without parts that tests have registered."""
    kinds = [entry.make for entry in algorithms if inspect.isclass(entry.make)]
    own = [kind for kind in kinds if kind.__module__.startswith("fedloom.")]
    return [kind for kind in own if issubclass(kind, Part)]


def module_trees() -> dict[str, ast.Module]:
    folder = Path(fedloom.parts.__path__[0])
    return {
        f"fedloom.parts.{path.stem}": ast.parse(path.read_text()) for path in folder.glob("*.py")
    }


def registers(tree: ast.Module) -> bool:
    decorators = [
        decorator
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for decorator in node.decorator_list
    ]
    return any("algorithms.register" in ast.unparse(decorator) for decorator in decorators)


def imported(tree: ast.Module) -> set[str]:
    """Return all modules that a module imports. `from a import b` may import `a.b`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_module_that_registers_a_part_imports_another_one() -> None:
    trees = module_trees()
    parts = {name for name, tree in trees.items() if registers(tree)}
    assert {kind.__module__ for kind in part_classes()} <= parts
    assert len(parts) > 15
    for name in sorted(parts):
        assert imported(trees[name]) & parts == set(), name


SETTINGS = {
    "quantised": ["quantised(fedavg, down=8)", "quantised(fedavg)"],
    "power_of_choice": ["power_of_choice(fedavg)", "power_of_choice(fedavg, ask=false)"],
    "clustered": ["clustered(fedavg)", "clustered(fedavg, by=size)"],
    "stages": ["stages(fedavg:1, fedmr)", "stages(fedavg:auto, fedmr)"],
    "robust": ["robust(fedavg, rule=median)", "robust(fedavg, rule=krum)"],
    "secure": [
        "secure(fedmr)",
        "secure(fedmr, when=before_train)",
        "secure(fedmr, when=before_upload)",
    ],
    **{name: [f"{name}(fedavg, noise=1.0)"] for name in PRIVATE},
}
"""Settings of parts that can use other hooks. One setting is enough for all other parts."""


@pytest.mark.parametrize("kind", part_classes(), ids=lambda kind: kind.__name__)
def test_a_part_acts_in_the_hooks_that_it_declares_and_overrides_no_other(kind: type[Part]) -> None:
    name = next(entry.name for entry in algorithms if entry.make is kind)
    declared: set[str] = set()
    for expression in SETTINGS.get(name, [WRAPPERS.get(name, name)]):
        part = build(expression)
        assert isinstance(part, kind)
        assert part.hooks() <= frozenset(HOOKS)
        declared |= part.hooks()
    overridden = {hook for hook in HOOKS if getattr(kind, hook) is not getattr(Part, hook)}
    assert declared == overridden


@pytest.mark.parametrize("kind", part_classes(), ids=lambda kind: kind.__name__)
def test_a_part_has_no_function_of_an_algorithm_that_the_pipeline_never_calls(
    kind: type[Part],
) -> None:
    never_called = {"send", "receive", "update", "model", "shared", "complete"}
    assert never_called <= vars(Algorithm).keys() - set(dir(Part))
    for base in kind.__mro__[: kind.__mro__.index(Part)]:
        assert never_called & vars(base).keys() == set()


@pytest.mark.parametrize(
    ("hook", "companions"), [("poll", ("answer", "on_poll")), ("release", ("fold",))]
)
def test_hooks_that_belong_together_are_overridden_together(
    hook: str, companions: tuple[str, ...]
) -> None:
    for kind in part_classes():
        acts = getattr(kind, hook) is not getattr(Part, hook)
        assert [getattr(kind, name) is not getattr(Part, name) for name in companions] == [
            acts
        ] * len(companions)


def test_hooks_are_functions_of_a_part() -> None:
    assert len(set(HOOKS)) == len(HOOKS)
    assert all(inspect.isfunction(getattr(Part, hook)) for hook in HOOKS)


@pytest.mark.parametrize("name", ["deploy", "personalise", "complete"])
def test_a_method_that_decides_what_clients_use_is_personal(name: str) -> None:
    """Each of these functions can change the model that a client uses."""
    own = type("Own", (FedAvg,), {name: lambda self, *arguments: arguments[-1]})
    assert is_personal(own())
    assert Pipeline(own()).personal
    assert not is_personal(FedAvg())
    own.facts = Facts(deploys="received")
    assert not is_personal(own())
