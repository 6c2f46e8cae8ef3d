"""The folders of machines from `fedloom flower init`: complete, runnable, and with private keys."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedloom.sites.node_config import NodeConfig
from forking_cli import main
from json_lines import json_lines
from superlink_support import free_port, needs_flower

pytestmark = needs_flower

_RECORDER = """\
#!{python}
import json, os, sys
with open({calls!r}, "a") as file:
    interval = os.environ.get("FLWR_SUPEREXEC_TASK_POLL_INTERVAL")
    print(json.dumps([interval, os.getcwd(), *sys.argv]), file=file)
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["flower", "init", "my-app", "--host", "fl.example.org", "data.clients=2"]) == 0
    return tmp_path / "my-app"


def scripts(app: Path) -> list[Path]:
    return sorted((app / "machines").rglob("*.sh"))


def calls_of(script: Path, folder: Path) -> list[list[str]]:
    """Return the programs that a script starts: interval, folder, program and arguments."""
    programs, calls = folder / "programs", folder / "calls.jsonl"
    programs.mkdir(exist_ok=True)
    for name in ("flower-superlink", "flower-supernode", "flwr"):
        (programs / name).write_text(_RECORDER.format(python=sys.executable, calls=str(calls)))
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([str(script)], env={**os.environ, "PATH": path}, check=True, timeout=120)
    rows: list[list[str]] = json_lines(calls)  # type: ignore[assignment]
    calls.unlink()
    return rows


def test_every_machine_has_its_files_and_scripts_that_a_shell_reads(app: Path) -> None:
    machines = app / "machines"
    common = {"ca.crt", "peers.pub", "site.conf", "site.key", "start-site.sh"}
    for site in (0, 1):
        assert {path.name for path in (machines / f"site-{site}").iterdir()} == common
    server = {path.name for path in (machines / "server").iterdir()}
    assert {"server.crt", "server.key", "server.conf", "start-server.sh"} <= server
    assert len(scripts(app)) == 4
    for script in scripts(app):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK)
    for key in machines.rglob("*.key"):
        assert key.stat().st_mode & 0o077 == 0


def test_the_script_of_a_site_starts_a_supernode_with_its_own_files(
    app: Path, tmp_path: Path
) -> None:
    folder = (tmp_path / "another place").resolve()
    (app / "machines" / "site-1").rename(folder)  # copied to its machine
    conf = folder / "site.conf"
    conf.write_text(conf.read_text().replace('DATA=""', 'DATA="/srv/my data.csv"', 1))
    ((interval, place, program, *arguments),) = calls_of(folder / "start-site.sh", tmp_path)
    assert (interval, place, Path(program).name) == ("0.05", str(folder), "flower-supernode")
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options["--superlink"] == "fl.example.org:8000"
    for option in ("--root-certificates", "--auth-supernode-private-key"):
        assert (folder / options[option]).is_file()
    pairs = re.findall(r"([\w-]+)=(?:'([^']*)'|(\d+))", options["--node-config"])
    table = {name: text or int(number) for name, text, number in pairs}
    node = NodeConfig.read(table)
    assert (node.number, node.sites, node.data) == (1, 2, "/srv/my data.csv")
    assert node.memory == folder / "memory"
    assert node.identity is not None
    assert node.identity.public_keys.keys() == {0, 1}


def test_the_script_of_the_server_registers_every_site(app: Path, tmp_path: Path) -> None:
    calls = calls_of(app / "machines" / "server" / "start-server.sh", tmp_path)
    assert {interval for interval, *_ in calls} == {"0.05"}
    commands = [[Path(program).name, *rest] for _, _, program, *rest in calls]
    (superlink,) = [words for words in commands if words[0] == "flower-superlink"]
    assert superlink[superlink.index("--host") + 1] == "0.0.0.0"
    for option in ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"):
        file = superlink[superlink.index(option) + 1]
        assert (app / "machines" / "server" / file).is_file()
    registered = [words[3] for words in commands if words[1:3] == ["supernode", "register"]]
    assert registered == ["site-0.pub", "site-1.pub"]


@contextmanager
def started(script: Path, environment: Mapping[str, str]) -> Iterator[Path]:
    """Run a script with its child processes; yield its log."""
    log = script.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(script)], stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.minutes
def test_three_sites_train_by_their_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["flower", "init", "my-app", "rounds=2", "data.clients=3"]) == 0
    machines = tmp_path / "my-app" / "machines"
    port = free_port()
    for conf in machines.rglob("*.conf"):
        text = conf.read_text()
        text = text.replace("PORT=8000", f"PORT={port}").replace(":8000", f":{port}")
        conf.write_text(re.sub(r"PORT=909\d", f"PORT={free_port()}", text))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with started(machines / "server" / "start-server.sh", environment) as log:
        end = time.monotonic() + 300
        while "The server is ready" not in log.read_text():
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        site = [machines / f"site-{k}" / "start-site.sh" for k in range(3)]
        with (
            started(site[0], environment),
            started(site[1], environment),
            started(site[2], environment),
        ):
            subprocess.run([machines / "run.sh"], env=environment, check=True, timeout=900)
    rows = json_lines(machines / "server" / "runs" / "my-app" / "metrics.jsonl")
    assert [(row["round"], row["faults"]) for row in rows] == [(1, []), (2, [])]
