"""Measure a round over Flower beside an app of Flower that does nothing, in one run.

A SuperLink and three SuperNodes run as processes on this machine, with the polling interval of the
start scripts. They train the example of `fedloom flower init` (the digits, one message per site and
round) with and without workers, by a method and by `secure`, and a table. The empty app sends
messages without content. `seconds` are per round, a median without the first one. `over` is their
ratio to the empty app: what fedloom adds to Flower. `processor_s` are processor seconds per message
to a site, of all its processes, including polling.

    python benchmarks/flower_round.py [--rounds 8] [--cases empty,fedmr]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import superlink_support
from outcome import tell
from site_trial import PATIENCE, Trial, owner_settings

SITES = 3
POLLING = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05"}

PROJECT = """
[project]
name = "empty"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "local"

[tool.flwr.app.components]
serverapp = "empty.server:app"
clientapp = "empty.client:app"

[tool.flwr.app.config]
rounds = 0
output = ""
"""

CLIENT = """
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    return Message(RecordDict(), reply_to=message)
"""

SERVER = """
import json, time
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    seconds = []
    for number in range(context.run_config["rounds"]):
        began = time.monotonic()
        nodes = list(grid.get_node_ids())
        messages = [Message(RecordDict(), node, MessageType.TRAIN) for node in nodes]
        assert len(list(grid.send_and_receive(messages))) == len(nodes)
        seconds.append(time.monotonic() - began)
    with open(context.run_config["output"], "w") as file:
        json.dump(seconds, file)
"""

CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    # name: (method, minutes of a worker, changes of the configuration)
    "fedmr": ("fedmr", 5, ()),
    "fedmr without workers": ("fedmr", 0, ()),
    "secure": ("secure(fedmr)", 5, ()),
    "table": ("fedavg", 5, ("data.name=breast_cancer",)),
}


def used(deployment: superlink_support.Deployment) -> float:
    """Return processor seconds of all processes of the sites and their finished child processes."""
    ticks = 0
    for site in range(SITES):
        for pid in deployment.running(f"site-{site}"):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def empty(deployment: superlink_support.Deployment, rounds: int) -> list[float]:
    """Run the app that does nothing, and return the seconds of each round."""
    folder = deployment.folder / "app"
    (folder / "empty").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("client", CLIENT), ("server", SERVER)):
        (folder / "empty" / f"{name}.py").write_text(text)
    output = deployment.folder / "seconds.json"
    run = deployment.run(folder, rounds=rounds, output=str(output))
    status = deployment.wait_for_run(run, PATIENCE, sign=output)
    assert status.startswith("finished:completed"), deployment.logs()
    seconds: list[float] = json.loads(output.read_text())
    return seconds


def trained(name: str, deployment: superlink_support.Deployment, rounds: int) -> list[float]:
    """Train a case of fedloom, and return the seconds of each round."""
    method, _, changes = CASES[name]
    trial = Trial(deployment, "round", method, rounds, *changes)
    trial.wait(trial.start())
    lines = (trial.output / "timings.jsonl").read_text().splitlines()
    return [json.loads(line)["seconds"] for line in lines]


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return one line of the table."""
    run, minutes = (empty, 0) if name == "empty" else (partial(trained, name), CASES[name][1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)

        def settings(site: int) -> dict[str, str | int]:
            return owner_settings(path, site) | {"worker-minutes": minutes}

        with superlink_support.deployed(path, SITES, settings, hurried=False) as deployment:
            before = used(deployment)
            seconds = run(deployment, rounds)
            spent = used(deployment) - before
    row: dict[str, Any] = {"app": name, "seconds": statistics.median(seconds[1:])}
    row["processor_s"] = spent / SITES / rounds
    print(*row.values(), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cases", default=",".join(["empty", *CASES]))
    arguments = parser.parse_args()
    os.environ.update(POLLING)
    rows = [measure(name, arguments.rounds) for name in arguments.cases.split(",")]
    floor = next((row["seconds"] for row in rows if row["app"] == "empty"), None)
    for row in rows:
        row["over"] = None if floor is None else row["seconds"] / floor
    tell("a round at three sites over a round of an empty app", rows)


if __name__ == "__main__":
    main()
