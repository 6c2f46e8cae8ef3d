"""`fedloom check` finds each planted mistake and nothing more; runs report these mistakes too."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom as fl
import wrong_methods
from every_method import EVERY_METHOD
from fedloom.algorithm import Algorithm, algorithms
from fedloom.cli import main
from fedloom.common.errors import InvalidValue, RefusedReply, error_location
from fedloom.engines.client_work import _picklable
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.parts.building import build
from fedloom.reviews.checker.check import examine
from fedloom.reviews.checker.trial import own_task, sample_of
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from small_task import KeepsClientMemory, small_task
from wrong_methods import MISTAKES

ROOT = Path(__file__).resolve().parents[2]

# A method in a user's file.
METHODS = """\
import fedloom as fl


class HalfStep(fl.Algorithm):
    step: float = 0.5

    def receive(self, round, replies):
        mean = replies["model"].mean(0)
        self.state["model"] = self.state["model"] + self.step * (mean - self.state["model"])


class Forgetful(HalfStep):
    def train(self, cohort, inbox):
        cohort.fit(inbox["model"])


class Odd(HalfStep):
    def receive(self, round, replies):
        raise ValueError("no, not today")
"""

JOB = """\
rounds = 2
engine = "rows"
algorithms = ["fedavg", "my_own:HalfStep(step=0.9)"]
model = "mlp(hidden=[4])"
data.clients = 5
"""


def wrong(name: str) -> Algorithm:
    method: Algorithm = getattr(wrong_methods, name)()
    return method


@pytest.mark.parametrize("name", MISTAKES)
def test_a_typical_mistake_is_found_in_its_line(name: str) -> None:
    (finding,) = fl.check(wrong(name))
    assert MISTAKES[name] in finding.problem
    file, line = re.match(r"(.*wrong_methods\.py):(\d+)", finding.location).groups()  # type: ignore[union-attr]
    assert Path(file).exists()
    assert inspect.getsourcelines(wrong_methods)[0][int(line) - 1].rstrip().endswith("# wrong")


def test_a_loss_that_keeps_a_graph_is_found_with_the_line_that_keeps_it() -> None:
    graph, written = fl.check(wrong("KeepsTheGraph"))
    assert "with the graph of an earlier batch: store value.detach()" in graph.problem
    assert "the client half writes self.last" in written.problem
    line = inspect.getsourcelines(wrong_methods)[0][
        int(written.location.split(":")[1].split()[0]) - 1
    ]
    assert line.rstrip().endswith("# wrong")


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "umf(feddc)", "stages(fedavg:1, fedmr)", "fedamp"]
)
def test_nothing_is_wrong_with_a_method_of_fedloom(method: str) -> None:
    assert fl.check(method) == []


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_no_method_of_fedloom_does_what_listeners_hear(method: str) -> None:
    assert examine(method, compare=False).findings == []


def test_memory_of_clients_is_no_mistake_and_is_counted() -> None:
    findings = examine(KeepsClientMemory(), small_task())
    assert findings.findings == []
    # the 8 bytes are the number of rounds
    assert findings.sizes["remembered by a client"] == findings.sizes["a model"] + 8


def test_checking_leaves_everything_as_it_was() -> None:
    state, initial = torch.get_rng_state(), own_task().initial.clone()
    method = wrong("AddsInPlace")
    fl.check(method)
    assert not hasattr(method, "state")
    assert torch.equal(own_task().initial, initial)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_task_of_the_users_is_made_small() -> None:
    task = fl.make_task("digits", clients=8, model="mlp(hidden=[4])", local_test=0.25)
    sample = sample_of(task)
    assert sample.clients == 8
    assert int(sample.partition.sizes.max()) <= 24
    assert len(set(sample.partition.sizes.tolist())) > 1
    assert fl.check("fedavg", task) == []


@pytest.mark.parametrize("engine", [RowsEngine, StackedEngine])
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ReturnsNothing", InvalidValue),
        ("ReturnsAllOfFit", InvalidValue),
        ("LosesTheAxis", InvalidValue),
        ("RepliesMore", RefusedReply),
        ("KeepsAllRows", InvalidValue),
        ("Widens", InvalidValue),
        ("EditsTheInbox", InvalidValue),
        ("CountsInTheState", InvalidValue),
    ],
)
def test_the_first_round_of_any_run_says_so_too(
    engine: Any, name: str, error: type[Exception]
) -> None:
    task = own_task()
    with pytest.raises(error, match=rf"{name}.* \(at .*wrong_methods\.py:\d+\)$") as caught:
        Federation(wrong(name), task, engine(task), Schedule(1, 0.5)).run()
    message = MISTAKES[name].replace("one row for each of 1 clients", "one row for each of")
    assert re.sub(r"\[4, ", "[3, ", message) in str(caught.value)


def test_the_place_of_an_error_outlives_its_traceback() -> None:
    try:
        wrong("DividesByZero").train(None, {})  # type: ignore[arg-type]
    except AttributeError as error:
        sent = pickle.loads(pickle.dumps(_picklable(error)))
    assert sent.__traceback__ is None
    assert re.fullmatch(r".*wrong_methods\.py:\d+ in train", error_location(sent))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    (folder / "my_own.py").write_text(METHODS)
    (folder / "job.toml").write_text(JOB)
    return folder


@pytest.fixture
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home))
    return home


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.mark.usefixtures("folder")
def test_the_command_names_each_mistake_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said_by(capsys, "check", "umf(my_own:HalfStep(step=0.9))")
    assert (code, text.splitlines()[0]) == (0, "umf(my_own:HalfStep(step=0.9)): nothing to fix")
    assert "remembered by a client: 212 B" in text
    code, text = said_by(capsys, "check", "my_own:Forgetful")
    assert code == 1
    assert text.startswith("my_own:Forgetful: 1 to fix\n  my_own.py:13: round 1, client ")
    assert ": Forgetful.train returned nothing" in text
    assert said_by(capsys, "check", "my_own:HalfStop") == (
        2,
        "fedloom: algorithm 'my_own:HalfStop': module 'my_own' has no 'HalfStop': did you mean "
        "'HalfStep'?\n",
    )
    code, text = said_by(capsys, "check", "fedmrr")
    assert code == 2
    assert "did you mean 'fedmr'?" in text
    assert said_by(capsys, "check", "fedmr", "rounds=2")[0] == 2


@pytest.mark.usefixtures("folder")
def test_the_command_checks_all_methods_of_a_configuration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = said_by(capsys, "check", "job.toml", "data.clients=4")
    assert code == 0
    assert re.findall(r"^(\S.*):", text, re.M) == ["fedavg", "my_own:HalfStep(step=0.9)"]
    code, text = said_by(capsys, "check", "job.toml", "algorithms=[my_own:Odd]")
    assert code == 1
    assert "my_own.py:19 in receive: ValueError: no, not today" in text


@pytest.mark.usefixtures("folder")
def test_an_error_in_a_users_code_shows_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said_by(capsys, "run", "job.toml", "algorithms=[my_own:Odd]", "--quiet")
    assert code == 1
    assert text == (
        "fedloom: ValueError: no, not today (at my_own.py:19 in receive) (FEDLOOM_TRACEBACK=1 "
        "prints the traceback)\n"
    )
    Path("my_broken.py").write_text("import torch\n\nmodel = torch.nothing\n")
    code, text = said_by(
        capsys, "run", "job.toml", "algorithm=fedavg", "model=my_broken:model", "--quiet"
    )
    assert code == 2
    assert text.endswith("has no attribute 'nothing' (at my_broken.py:3)\n")
    Path("my_typo.py").write_text("def model(:\n    pass\n")
    code, text = said_by(
        capsys, "run", "job.toml", "algorithm=fedavg", "model=my_typo:model", "--quiet"
    )
    assert text.endswith("(at my_typo.py:1)\n")


@pytest.mark.usefixtures("folder")
def test_a_class_of_ones_own_is_named_by_its_path() -> None:
    assert str(build("my_own:HalfStep(step=0.9)")) == "my_own:HalfStep(step=0.9)"
    assert "my_own:HalfStep" not in [entry.name for entry in algorithms]
    staged = build("stages(my_own:HalfStep:3, fedmr)")
    assert build(str(staged)) == staged
    with pytest.raises(InvalidValue, match="has no parameter 'stop': did you mean 'step'"):
        build("umf(my_own:HalfStep(stop=1))")
    with pytest.raises(
        InvalidValue, match=r"is not a method: give a class that extends fedloom\.Algorithm"
    ):
        build("pathlib:Path")


def test_the_page_shows_what_is_said() -> None:
    page = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")
    table = page.partition("| Mistake | Message |")[2].partition("\n\n")[0]
    shown = re.findall(r"^\| [^|]+ \| `([^`|]+)`", table, re.M)
    assert len(shown) >= 12
    assert [
        text
        for text in shown
        if not any(message in text or text in message for message in MISTAKES.values())
    ] == []
