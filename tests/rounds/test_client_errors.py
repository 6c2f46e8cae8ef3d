"""Errors in training name the clients, as in the user's data, and the round, in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from engine_support import CLIENTS, NAMES, TASK, named_task, run
from fedloom.common.errors import InvalidValue, RefusedReply, UnknownName
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.rounds.client_errors import ClientLabels, marking_clients, naming_clients
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from forking_cli import saying
from process_support import Misconfigured

ROUND = Round(1, 1, 3, CLIENTS, 1, 0.1, 0.1)
METHOD = """
import fedloom as fl

class Mine(fl.FedAvg):
    def train(self, cohort, inbox):
        if cohort.round.number == 2:
            {fault}
        return super().train(cohort, inbox)
"""


class Particular(nn.Module):
    """A model that refuses inputs above 50."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and bool((inputs > 50).any()):
            raise ValueError("an input\nis too large")
        logits: Tensor = self.out(inputs)
        return logits


def test_an_error_in_lock_step_names_the_clients_of_the_stack() -> None:
    task = named_task()
    largest_first = task.sizes(torch.arange(CLIENTS)).argsort(descending=True, stable=True)
    listed = ", ".join(f"'{NAMES[client]}'" for client in largest_first[:3].tolist())
    with pytest.raises(InvalidValue, match=f"^round 1, clients {listed} and 3 more: mu must be"):
        run(Misconfigured(), StackedEngine(task, chunk=CLIENTS), task=task)


def test_an_error_of_the_model_names_its_client() -> None:
    inputs = TASK.train.inputs.clone()
    inputs[TASK.partition.indices[-1]] = 99
    task = replace(named_task(), model=Particular())
    task = replace(task, train=replace(task.train, inputs=inputs))
    (notice,) = (text for text in run(fl.FedAvg(), RowsEngine(task), task=task).notices)
    assert notice.startswith("round 1 continues without a reply of client 'Faro': ValueError: an ")
    assert "\n" not in notice


def test_clients_without_names_have_the_users_numbers() -> None:
    """With clients that never train, the method's numbers of clients are others."""

    class Telling(fl.FedAvg):
        def train(self, cohort: fl.Cohort, inbox: fl.Message) -> fl.Message:
            raise KeyError(cohort.clients[0])

    schedule = Schedule(rounds=1, participation=0.25, seed=3, new_clients=0.34, personal_every=1)
    federation = Federation(Telling(), TASK, RowsEngine(TASK), schedule)
    with pytest.raises(KeyError) as caught:
        federation.run()
    (client,) = caught.value.args
    assert federation.numbers[client] != client
    assert caught.value.__notes__ == [f"round 1, client {federation.numbers[client]}"]


def test_a_refused_reply_names_its_client() -> None:
    class Short(fl.FedAvg):
        def train(self, cohort: fl.Cohort, inbox: fl.Message) -> fl.Message:
            return {"model": super().train(cohort, inbox)["model"][:, 1:]}

    expected = r"^round 1: no reply to Short is valid; client '\w+': 'model' has shape"
    with pytest.raises(RefusedReply, match=expected):
        run(Short(), RowsEngine(TASK), task=named_task())


def test_an_error_is_named_once_and_keeps_its_type() -> None:
    labels = ClientLabels(TASK, range(CLIENTS))
    error = UnknownName("layer", "haed", ["head"])

    def fail() -> None:
        with naming_clients(replace(ROUND, number=4), labels), marking_clients([2, 5]):
            raise error

    with pytest.raises(UnknownName), naming_clients(ROUND, labels):
        fail()
    assert str(error).startswith("round 4, clients 2, 5: unknown layer 'haed': did you mean")


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            "1 // 0",
            "ZeroDivisionError: integer division or modulo by zero; round 2, client '{client}'",
        ),
        ("raise fl.FedloomError('no mu')", "round 2, client '{client}': no mu"),
        ("return None", "round 2, client '{client}': Mine.train returned nothing: it must return"),
    ],
)
def test_the_command_prints_one_line_with_the_client(
    fault: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = f"mine{abs(hash(line))}"
    Path(f"{module}.py").write_text(METHOD.format(fault=fault))
    rows = [f"{k / 9},{'yn'[k % 2]},{'bc'[k % 3 == 0]}" for k in range(60)]
    Path("rows.csv").write_text("\n".join(["x,label,owner", *rows]))
    Path("run.toml").write_text(
        f'algorithm = "{module}:Mine"\nrounds = 3\nparticipation = 0.5\n'
        'model = "logistic"\nengine = "rows"\n[data]\n'
        'name = "table(path=\'rows.csv\', group=owner)"\nclients = 0\npartition = "natural"\n'
    )
    code, _, error = saying(capsys)("run", "run.toml")
    assert code
    client = re.search(r"client '([bc])'", error)
    assert client is not None
    assert error.startswith(f"fedloom: {line.format(client=client[1])}")
    assert f"{module}.py:" in error
    assert error.count("\n") == 1
