"""A Flower deployment on loopback: SuperLink with TLS and authentication, SuperNodes, `flwr`.

Each program has its own process. Each "machine" has a folder with its keys and its home for Flower.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedloom.sites.keys import Keys, make_keys

needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="Flower is missing"
)

needs_processes = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="processes are found in /proc"
)

_PROGRAMS = Path(sys.executable).parent

_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "OMP_NUM_THREADS": "1",  # three sites on two cores
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
    "PATH": f"{_PROGRAMS}{os.pathsep}{os.environ.get('PATH', '')}",
}

# `flower-supernode` that looks for messages every half a second instead of every 3 seconds.
_SUPERNODE = """
import sys, time, types
import flwr.supernode.start_client_internal as supernode
from flwr.supernode.cli import flower_supernode
supernode.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, 0.5)))
sys.argv[0] = "flower-supernode"
flower_supernode()
"""

# `flwr-clientapp` without the import of the SuperNode and its databases, which takes longer than
# all its other imports.
_CLIENTAPP = f"""\
#!{sys.executable}
import sys, types
sys.modules["flwr.supernode.cli.flower_supernode"] = types.SimpleNamespace(flower_supernode=None)
from flwr.supernode.cli import flwr_clientapp
flwr_clientapp()
"""

# A server for `flwr` commands, because `flwr` takes longer to start than to run a command. It reads
# arguments in JSON and prints the output.
_FLWR = """
import json, os, sys, tempfile
from flwr.cli.app import app
answers = os.fdopen(os.dup(1), "w")
said = tempfile.TemporaryFile("w+")
os.dup2(said.fileno(), 1)
os.dup2(said.fileno(), 2)
for line in sys.stdin:
    try:
        code = app(json.loads(line))
    except SystemExit as ending:
        code = ending.code
    sys.stdout.flush()
    said.seek(0)
    print(json.dumps([code or 0, said.read()]), file=answers, flush=True)
    said.seek(0)
    said.truncate()
"""


class Deployment:
    """A SuperLink and its sites.

    `folder` holds all their files; `keys` are their keys. Sites with `hurried` lose less time than
    Flower's programs.
    """

    def __init__(self, folder: Path, sites: int, hurried: bool) -> None:
        self.folder, self.count, self.hurried = folder, sites, hurried
        self.keys: Keys = make_keys(folder / "keys", sites)
        self.port = free_port()
        if hurried:
            (folder / "flwr-clientapp").write_text(_CLIENTAPP)
            (folder / "flwr-clientapp").chmod(0o700)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._latest: int | None = None
        connection = (
            '[superlink]\ndefault = "sites"\n\n[superlink.sites]\naddress = '
            f'"127.0.0.1:{self.port}"\n'
        )
        home = self._home("operator")
        (home / "config.toml").write_text(
            connection + f'root-certificates = "{self.keys.server / "ca.crt"}"\n'
        )
        self._operator = subprocess.Popen(
            [sys.executable, "-c", _FLWR],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self._environment("operator"), cwd=folder,
        )  # fmt: skip

    def start_server(self) -> None:
        """Start the SuperLink, or start it again, and wait until it answers.

        Its database holds its nodes and runs.
        """
        keys = self.keys.server
        self._start(
            "server",
            "flower-superlink", "--host", "127.0.0.1", "--port", str(self.port),
            "--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt"),
            "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth", "--disable-runtime-dependency-installation",
            "--database", str(self._home("server") / "superlink.db"),
        )  # fmt: skip
        trusted = ssl.create_default_context(cafile=str(keys / "ca.crt"))

        def answers() -> bool:
            try:
                with urllib.request.urlopen(
                    f"https://127.0.0.1:{self.port}/health", timeout=2, context=trusted
                ) as page:
                    return bool(page.status == 200)
            except OSError:
                return False

        self.wait_until(answers, 300, "the SuperLink to answer")

    def register(self) -> None:
        """Register the public key of each site at the SuperLink."""
        for site in range(self.count):
            self.flwr("supernode", "register", str(self.keys.public(site)))

    def start_site(self, site: int, **settings: str | int) -> None:
        """Start a site's SuperNode; `settings` go to its node-config beside its number.

        The start is repeated until the SuperLink accepts it. For up to a minute after the loss of a
        machine, the SuperLink regards its node as online, and refuses another with the same key.
        """
        values = {"partition-id": site, "num-partitions": self.count} | {
            name.replace("_", "-"): value for name, value in settings.items()
        }
        node_config = " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        patient = ("sh", "-c", 'until "$@"; do sleep 3; done', "sh")
        self._start(
            f"site-{site}",
            *patient,
            *self._node(self.keys.site(site) / "site.key"),
            "--node-config",
            node_config,
        )

    def turned_away(self, key: Path) -> str:
        """Return the output of a SuperNode with this private key, which the SuperLink refuses."""
        self._start("stranger", *self._node(key))
        assert self._processes["stranger"].wait(timeout=300) != 0
        self.kill("stranger")  # its child processes may still run
        return (self.folder / "stranger.log").read_text(errors="replace")

    def _node(self, key: Path) -> list[str]:
        """Return the command that starts a SuperNode."""
        return [
            *([sys.executable, "-c", _SUPERNODE] if self.hurried else ["flower-supernode"]),
            "--root-certificates", str(self.keys.server / "ca.crt"),
            "--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()),
            "--auth-supernode-private-key", str(key),
        ]  # fmt: skip

    def kill(self, name: str) -> None:
        """Send SIGKILL to every process of `server` or `site-<number>`, to simulate its loss."""
        process = self._processes.pop(name)
        while running := self.running(name):  # new ones may start during the kill
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
        process.wait(timeout=30)

    def flwr(self, *arguments: str) -> dict[str, Any]:
        """Return the answer of `flwr ...`, read from JSON."""
        code, output = self._flwr(*arguments, "sites", "--format", "json")
        begin = output.find("{")
        answer = json.loads(output[begin : output.rindex("}") + 1]) if begin >= 0 else {}
        if code != 0 or not answer.get("success"):
            raise AssertionError(f"flwr {' '.join(arguments)}: {output}\n{self.logs()}")
        return dict(answer)

    def _flwr(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and output of `flwr ...`."""
        assert self._operator.stdin is not None
        assert self._operator.stdout is not None
        self._operator.stdin.write(json.dumps(arguments) + "\n")
        self._operator.stdin.flush()
        code, output = json.loads(self._operator.stdout.readline())
        return code, output

    def run(self, app: Path, **configuration: str | float) -> int:
        """Start a run of the app and return its number.

        `configuration` changes values of the app's configuration.
        """
        values = [
            f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in configuration.items()
        ]
        options = [argument for value in values for argument in ("--run-config", value)]
        self._latest = int(self.flwr("run", str(app), *options)["run-id"])
        return self._latest

    def status(self, run: int) -> str:
        """Return the status, such as `running`, `finished:completed` or `finished:failed`."""
        runs = self.flwr("list", "--run-id", str(run))["runs"]
        return str(runs[0]["status"])

    def wait_for_run(self, run: int, seconds: float, sign: Path | None = None) -> str:
        """Wait for the end of a run and return its status.

        The run writes the file `sign` at its end, which saves many status requests.
        """
        status, polled = "", 0.0

        def ended() -> bool:
            nonlocal status, polled
            signalled = sign is not None and sign.exists()
            if signalled or time.monotonic() > polled + (3 if sign is None else 15):
                status = self.status(run)
                polled = time.monotonic()
            return status.startswith("finished")

        self.wait_until(ended, seconds, f"run {run} to end")
        return status

    def wait_for_sites(self, count: int, seconds: float = 300) -> None:
        """Wait until `count` SuperNodes are online."""

        def online() -> bool:
            nodes = self.flwr("supernode", "list")["nodes"]
            return bool(sum(node["status"] == "online" for node in nodes) >= count)

        self.wait_until(online, seconds, f"{count} SuperNodes to be online", pause=1)

    def wait_until(
        self, done: Callable[[], bool], seconds: float, event: str, pause: float = 0.2
    ) -> None:
        """Wait for a condition; fail with all logs after the time limit or the end of a process."""
        end = time.monotonic() + seconds
        while not done():
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise AssertionError(
                        f"{name} ended with {process.returncode}, waiting for "
                        f"{event}\n{self.logs()}"
                    )
            if time.monotonic() > end:
                raise AssertionError(
                    f"{seconds} seconds were not enough for {event}\n{self.logs()}"
                )
            time.sleep(pause)

    def logs(self, lines: int = 60) -> str:
        """Return the last lines of each process's log and of the latest run's log."""
        texts = {
            path.stem: path.read_text(errors="replace")
            for path in sorted(self.folder.glob("*.log"))
        }
        if self._latest is not None and "server" in self._processes:
            texts["run"] = self._flwr("log", "--show", str(self._latest), "sites")[1]
        return "\n".join(
            "\n".join([f"--- {name}", *text.splitlines()[-lines:]]) for name, text in texts.items()
        )

    def stop(self) -> None:
        """Kill all remaining processes."""
        self._operator.kill()
        self._operator.communicate()
        for name in list(self._processes):
            self.kill(name)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(name),
                cwd=self._home(name),
                start_new_session=True,
            )

    def workers(self, site: int) -> list[int]:
        """Return the worker processes of a site."""
        return self.running(f"site-{site}", b"site_worker")

    def running(self, name: str, program: bytes = b"") -> list[int]:
        """Return the processes of a machine.

        They are found by its home, because Flower starts some in other sessions. `program` selects
        the processes with this name in their command.
        """
        mark = f"FLWR_HOME={self._home(name)}".encode()
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    mark in (folder / "environ").read_bytes().split(b"\0")
                    and program in (folder / "cmdline").read_bytes()
                ):
                    pids.append(int(folder.name))
            # it has ended, or belongs to another user
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return pids

    def _home(self, name: str) -> Path:
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _environment(self, name: str) -> dict[str, str]:
        variables = {
            **os.environ,
            **_ENVIRONMENT,
            "FLWR_HOME": str(self._home(name)),
            "TMPDIR": str(self._home(name)),
        }
        if name.startswith("site"):
            variables["SITE_DATA"] = str(self.folder / name.replace("site", "data"))
        if self.hurried and name.startswith("site"):
            # Flower starts its programs by name
            variables["PATH"] = f"{self.folder}{os.pathsep}{variables['PATH']}"
            variables["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.3"
        return variables


@contextmanager
def deployed(
    folder: Path, sites: int, settings: Callable[[int], dict[str, str | int]], hurried: bool = True
) -> Iterator[Deployment]:
    """Run a deployment with registered sites that are online.

    `settings` of a site go to its node-config.
    """
    deployment = Deployment(folder, sites, hurried)
    try:
        deployment.start_server()
        deployment.register()
        for site in range(sites):
            deployment.start_site(site, **settings(site))
        deployment.wait_for_sites(sites)
        yield deployment
    finally:
        deployment.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
