"""Trials of the harness: each disturbs runs, files, inputs or federations and checks the required
result.

A trial is constructed once and then repeated. Each call of `once` makes one disturbance, drawn from
`draw`, and returns the outcome in one word. It raises `Wrong` for a wrong result. Add new trials to
`TRIALS` and new malicious sites to `sites.SITES`.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from chaos.sites import SITES
from damage import damages, mutated
from every_method import EVERY_METHOD
from fedloom.algorithm import Algorithm
from fedloom.algorithms.scaffold import Scaffold
from fedloom.common.errors import FedloomError
from fedloom.common.expression import parse
from fedloom.data.formats.numpy_files import read_arrays
from fedloom.data.partition import Partition
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.parts.building import build
from fedloom.parts.course import pipelines
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.runs.config_file import load
from fedloom.runs.directory import folder_name
from fedloom.secure import InMemoryTransport
from fedloom.secure.faults import ProtocolViolation
from fedloom.secure.wire import PeerMessage
from fedloom.state.tensors import read_tensors, write_tensors
from flower_support import CLIENTS, EVERYBODY, LocalGrid, flower, nodes, run_config
from forking_cli import OPERATIONS, Command, Server, serving
from hostile_files import Sets, changed
from ray_support import descendants, gone_soon
from secure_support import World
from site_trial import Trial as SiteTrial
from site_trial import owner_settings
from small_task import KeepsClientMemory, small_task
from superlink_support import deployed

SECONDS, MEBIBYTES = 10.0, 1024  # limits for reading an input


class Wrong(AssertionError):
    """A result was wrong."""


class Trial(ABC):
    """A repeated disturbance, in a separate `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @abstractmethod
    def once(self, draw: random.Random) -> str:
        """Disturb once and return the outcome; raise `Wrong` for a wrong result."""

    def close(self) -> None:
        """End all processes of the trial."""
        return


# --- killed runs and damaged files ---

JOB = """
algorithm = "{method}"
rounds = 12
participation = {participation}
checkpoint_every = 3
evaluate_every = 1
threads = 1
engine = "{engine}"
model = "mlp(hidden=[8])"
[data]
clients = 6
partition = "dirichlet(0.5)"
local_test = 0.25
"""
CLOCK = """
[clock]
speed = "stragglers(100, 10)"
deadline = 12
"""
OPTIONS = ('record=["similarity"]',)
KEPT = (
    "metrics.jsonl",
    "clients.jsonl",
    "model.safetensors",
    "split.npz",
    "configuration.json",
    "task.json",
)
# fedbn needs batch norm; without batch norm, silobn is similar
METHODS = sorted({*EVERY_METHOD} - {"fedbn"})
ENGINES = ("rows", "stacked")


def job(method: str, engine: str) -> str:
    """Return the job: rows wait for all clients; stacks and asynchronous methods use a clock."""
    clock = CLOCK if engine == "stacked" or next(pipelines(build(method))).waits else ""
    participation = 1.0 if method.startswith(EVERYBODY) else 0.5
    return JOB.format(method=method, engine=engine, participation=participation) + clock


class Runs(Trial):
    """Runs of a small job, and comparison of their files with an undisturbed run."""

    undisturbed: dict[tuple[str, str], dict[str, bytes]]
    files: tuple[str, ...] = KEPT
    options: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.undisturbed, self.numbers = {}, count()
        self.stack = ExitStack()
        self.process = self.stack.enter_context(serving())

    def close(self) -> None:
        self.stack.close()

    def server(self, method: str, engine: str) -> Server:
        folder = self.folder / str(next(self.numbers))
        folder.mkdir()
        (folder / "job.toml").write_text(job(method, engine))
        return Server(self.process, folder)

    def expected(self, method: str, engine: str) -> dict[str, bytes]:
        if (method, engine) not in self.undisturbed:
            server = self.server(method, engine)
            if (code := server.run("run", "job.toml", "--quiet", *self.options))[0] != 0:
                raise Wrong(f"{method} on {engine} fails undisturbed: {code[1]}")
            path = place_of(server)
            self.undisturbed[method, engine] = {
                name: content_of(path / name) for name in self.files
            }
            shutil.rmtree(server.folder)
        return self.undisturbed[method, engine]

    def require_same(
        self, server: Server, expected: dict[str, bytes], trial: str, folder: Path | None = None
    ) -> None:
        for name, content in expected.items():
            if content_of((folder or place_of(server)) / name) != content:
                raise Wrong(f"{trial}: {name} differs from that of a run that was not disturbed")
        if leftovers := list(server.folder.rglob("*.writing")):
            raise Wrong(f"{trial}: {leftovers[0].name} was left behind")


WHOLE: dict[str, Callable[[Path], object]] = {
    ".safetensors": read_tensors,
    ".npz": Partition.load,
    ".json": lambda path: json.loads(path.read_bytes()),
}
"""Readers of files that are complete or absent at any moment, by their endings."""


def require_whole(folder: Path, trial: str) -> None:
    """Raise `Wrong` for a file of a killed run that is neither complete nor absent."""
    for path in folder.rglob("*"):
        unfinished = any(name.endswith(".writing") for name in path.parts)
        if path.suffix not in WHOLE or unfinished:
            continue
        try:
            WHOLE[path.suffix](path)
        except (FedloomError, ValueError) as error:
            raise Wrong(f"{trial}: {path.name} is left in pieces: {error}") from error


def content_of(path: Path) -> bytes:
    """Return the bytes of a file; for result.json, omit all measured times."""
    if path.name != "result.json":
        return path.read_bytes()
    figures = json.loads(path.read_bytes())
    files = {name: digest for name, digest in figures["files"].items() if name != "timings.jsonl"}
    figures = {
        name: value for name, value in figures.items() if name not in ("seconds", "digest", "files")
    }
    return json.dumps([figures, files]).encode()


def place_of(server: Server) -> Path:
    """Return the directory of the only run."""
    (path,) = server.folder.glob("runs/job/*/seed-0")
    return path


class Cuts(Runs):
    """Stops a run in the middle of a write or before a rename, and starts it again.

    Most operations are from the first, a middle and the last round, and the rest from all of a run.
    """

    methods = ("fedavg", "scaffold", "fedmr", "ditto")
    files = (*KEPT, "result.json", "recorded.jsonl")
    options = OPTIONS

    rounds = (0, 1, 5, 6, 11, 12)  # a checkpoint follows every third round

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.listed: dict[str, list[tuple[int, str, bool]]] = {}

    def operations(self, method: str) -> list[tuple[int, str, bool]]:
        """Return number and file of each operation, and whether it is in one of `rounds`."""
        if method not in self.listed:
            server = self.server(method, "rows")
            server.run("run", "job.toml", "--quiet", *self.options, die_at=-1)
            names = (server.folder / OPERATIONS).read_text().splitlines()
            shutil.rmtree(server.folder)
            finished, listed = 0, []
            for number, name in enumerate(names, start=1):
                listed.append((number, f"{name} after round {finished}", finished in self.rounds))
                finished += name == "metrics.jsonl"
            self.listed[method] = listed
        return self.listed[method]

    def once(self, draw: random.Random) -> str:
        method = draw.choice(self.methods)
        operations = self.operations(method)
        often = [entry for entry in operations if entry[2]]
        number, write, _ = draw.choice(often if draw.random() < 0.8 else operations)
        expected, server = self.expected(method, "rows"), self.server(method, "rows")
        code, output = server.run("run", "job.toml", "--quiet", *self.options, die_at=number)
        if code != -signal.SIGKILL:
            raise Wrong(f"{method}: write {number} ({write}) was not reached: {output}")
        require_whole(server.folder, f"{method}, cut in {write}")
        code, output = server.run("run", "job.toml", "--quiet", *self.options)
        if code != 0:
            raise Wrong(f"{method}, cut in {write}, does not go on: {output}")
        self.require_same(server, expected, f"{method}, cut in {write}")
        shutil.rmtree(server.folder)
        return write.partition(" ")[0]


class Kills(Runs):
    """Kills a run of any method at random moments or in the middle of writes, and starts it again
    each time.
    """

    files = (*KEPT, "result.json")

    def once(self, draw: random.Random) -> str:
        method, engine = draw.choice(METHODS), draw.choice(ENGINES)
        expected, server = self.expected(method, engine), self.server(method, engine)
        killed = 0
        for _ in range(3):
            if draw.random() < 0.5:
                code, _ = server.run("run", "job.toml", "--quiet", die_at=draw.randint(1, 40))
            else:
                command = server.start("run", "job.toml", "--quiet")
                time.sleep(draw.random() * 0.6)
                with suppress(ProcessLookupError):
                    command.send(signal.SIGKILL)
                code, _ = command.wait()
            killed += code == -signal.SIGKILL
            require_whole(server.folder, f"{method} on {engine}, killed")
        code, output = server.run("run", "job.toml", "--quiet")
        if code != 0:
            raise Wrong(f"{method} on {engine} does not go on after {killed} kills: {output}")
        self.require_same(server, expected, f"{method} on {engine}, killed {killed} times")
        shutil.rmtree(server.folder)
        return f"{killed} kills, the same bytes"


class Workers(Runs):
    """Kills a run or comparison with two workers, or one of the workers.

    No worker outlives the run, and the resumed run equals the rows engine byte for byte.
    """

    ways: tuple[tuple[str, ...], ...] = (
        ("run", "engine=processes(workers=2)"), ("compare", "engine=rows", "workers=2"),
    )  # fmt: skip

    victims: tuple[str, ...] = ("it", "it", "a worker")

    def workers(self, parent: int) -> list[int]:
        """Return the worker processes that run now."""
        return descendants(parent)

    def processes(self, victim: str, command: Command, workers: list[int]) -> list[int]:
        """Return the candidate processes to kill."""
        return [command.pid] if victim == "it" else workers

    def once(self, draw: random.Random) -> str:
        (kind, *options), methods = draw.choice(self.ways), draw.sample(WORKERS_METHODS, 2)
        methods = methods if kind == "compare" else methods[:1]
        options.append(
            f"algorithms={json.dumps(methods)}" if kind == "compare" else f"algorithm={methods[0]}"
        )
        expected = {folder_name(method): self.expected(method, "rows") for method in methods}
        server, command_line = self.server(methods[0], "rows"), f"{kind} {' '.join(options)}"
        command = server.start(kind, "job.toml", "--quiet", *options)
        workers: list[int] = []
        while not workers and command.running():
            workers = self.workers(command.pid)
        until, rounds = draw.random() * 0.3, draw.randint(0, 8)
        while command.running() and written(server) < rounds:
            time.sleep(0.01)
        time.sleep(until)
        workers, victim = self.workers(command.pid), draw.choice(self.victims)
        with suppress(ProcessLookupError, IndexError):  # it may have ended
            os.kill(draw.choice(self.processes(victim, command, workers)), signal.SIGKILL)
        command.wait()
        if not gone_soon(workers):
            raise Wrong(f"{command_line}: a worker outlived it")
        code, output = server.run(kind, "job.toml", "--quiet", *options)
        if code != 0:
            raise Wrong(f"{command_line} does not go on after a kill: {output}")
        for name, contents in expected.items():
            compared = {
                file: content for file, content in contents.items() if file != "configuration.json"
            }
            self.require_same(
                server, compared, command_line, server.folder / "runs/job" / name / "seed-0"
            )
        shutil.rmtree(server.folder)
        return f"{kind}, {victim} killed"


WORKERS_METHODS = ("fedavg", "scaffold", "ditto", "fedmr")


class Actors(Workers):
    """Repeats `Workers` on Ray clusters of the command, and also kills their single node."""

    ways = (("run", "engine=ray(workers=2)"), ("compare", "engine=rows", "workers=2", "pool=ray"))
    victims = ("it", "a worker", "its node")

    def workers(self, parent: int) -> list[int]:
        """Return the Ray workers without the agents of Ray.

        The agents may need a minute to detect the end of their cluster.
        """
        return _running(
            parent, lambda command: command.startswith("ray::") and "Agent" not in command
        )

    def processes(self, victim: str, command: Command, workers: list[int]) -> list[int]:
        if victim == "its node":
            return _running(command.pid, lambda words: words.partition("\0")[0].endswith("/raylet"))
        return super().processes(victim, command, workers)


def _running(parent: int, matches: Callable[[str], bool]) -> list[int]:
    """Return the descendants of a process with a command line that satisfies `matches`."""
    processes = []
    for process in descendants(parent):
        with suppress(OSError):
            if matches(Path(f"/proc/{process}/cmdline").read_text()):
                processes.append(process)
    return processes


def written(server: Server) -> int:
    """Return the number of rounds with figures over all runs."""
    return sum(
        path.read_bytes().count(b"\n")
        for path in server.folder.glob("runs/job/*/seed-0/metrics.jsonl")
    )


READERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": lambda path: {
        name: tensor.tolist() for name, tensor in read_tensors(path)[0].items()
    },
    "split.npz": lambda path: [
        row.tolist() for row in (Partition.load(path).indices, Partition.load(path).offsets)
    ],
}


class Damages(Runs):
    """Damages one file of a stopped run: the run ends with equal results, or is refused in one
    line.
    """

    methods = ("fedavg", "scaffold", "ditto", "stages(fedavg:4, fedmr)")
    turns = 12  # damages to copies of each stopped run
    damaged = 0

    def once(self, draw: random.Random) -> str:
        if self.damaged % self.turns == 0:
            if self.damaged:
                shutil.rmtree(self.stopped.folder)
            self.method = draw.choice(self.methods)
            self.stopped = self.server(self.method, "rows")
            # The largest values are beyond the end of the run.
            self.stopped.run("run", "job.toml", "--quiet", die_at=draw.randint(12, 60))
        self.damaged += 1
        method, expected, server = (
            self.method,
            self.expected(self.method, "rows"),
            self.server(self.method, "rows"),
        )
        shutil.copytree(self.stopped.folder, server.folder, dirs_exist_ok=True)
        path = draw.choice(
            sorted(
                path
                for path in place_of(server).rglob("*")
                if path.stat().st_size and path.is_file()
            )
        )
        ((damage, content),) = damages_of(path.read_bytes(), draw)
        path.write_bytes(content)
        code, output = server.run("run", "job.toml", "--quiet")
        damage = f"{method}, {path.name}: {damage}"
        if "Traceback" in output or "FEDLOOM_TRACEBACK" in output:
            raise Wrong(f"{damage}: {output}")
        if code == 0:
            # a finished run does not read this file
            if path.name in READERS and path.read_bytes() == content:
                parsed = None
                with suppress(FedloomError):
                    parsed = READERS[path.name](path)
                path.write_bytes(expected[path.name])
                if parsed not in (None, READERS[path.name](path)):
                    raise Wrong(f"{damage}: it is read as something else")
            self.require_same(server, expected, damage)
            outcome = (
                "noticed"
                if "damaged" in output or "going on" in output or "starting again" in output
                else "mended"
            )
        elif code == 2 and "seed-0" in output and len(output.splitlines()) == 1:
            outcome = "refused"
        else:
            raise Wrong(f"{damage}: exit code {code}: {output}")
        shutil.rmtree(server.folder)
        return outcome


class Resumptions(Trial):
    """Damages files of small federations in this process, at a tenth of the cost.

    Memory and pools are in files.
    """

    methods: ClassVar[Mapping[str, Callable[[], Algorithm]]] = {
        "memory": KeepsClientMemory,
        "scaffold": Scaffold,
        "pool": partial(build, "fedmr(blend=0.5)"),
        "replies under way": partial(build, "fedbuff(fedavg, k=2)"),
    }
    schedule = Schedule(
        rounds=6,
        participation=0.5,
        seed=3,
        evaluate_every=1,
        checkpoint_every=2,
        personal_every=3,
        pool_budget=0,
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ends = {}
        for name in self.methods:
            federation = self.federation(name, folder / name)
            while federation.finished < self.schedule.rounds:
                federation.step()
                if federation.finished % 2 == 0 or name == "pool":
                    federation.save()
                shutil.copytree(folder / name, folder / f"{name} {federation.finished}")
            self.ends[name] = self.end(federation, folder / name)

    def federation(self, name: str, folder: Path) -> Federation:
        task = small_task()
        return Federation(
            self.methods[name](),
            task,
            RowsEngine(task, memory_budget=0),
            self.schedule,
            folder,
            "one",
        )

    def end(self, federation: Federation, folder: Path) -> list[object]:
        figures = [(folder / name).read_bytes() for name in ("metrics.jsonl", "clients.jsonl")]
        return [federation.model().tolist(), federation.integers.tolist(), *figures]

    def once(self, draw: random.Random) -> str:
        name, folder = draw.choice(list(self.methods)), self.folder / "damaged"
        shutil.copytree(self.folder / f"{name} {draw.randint(1, self.schedule.rounds)}", folder)
        path = draw.choice(
            sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        )
        ((damage, content),) = damages_of(path.read_bytes(), draw)
        path.write_bytes(content)
        damage = f"{name}, {path.name}: {damage}"
        try:
            federation = self.federation(name, folder)
            noticed = bool(federation.notices)
            federation.run()
            outcome = "noticed" if noticed else "mended"
            if self.end(federation, folder) != self.ends[name]:
                raise Wrong(
                    f"{damage}: another end than that of a run that was not disturbed, {outcome}"
                )
        except FedloomError as error:
            outcome = "refused"
            if "\n" in str(error) or path.name not in str(error):
                raise Wrong(f"{damage}: {error}") from error
        finally:
            shutil.rmtree(folder)
        return outcome


class SuperNodes(Trial):
    """Federations over three real SuperNodes with a killed process: a SuperNode, its worker, the
    server app, or the SuperLink with the server app.

    The federation continues, if necessary after a restart, and equals bit for bit a simulation with
    the same absent sites.
    """

    victims = ("a SuperNode", "a worker", "the server app", "the SuperLink")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.numbers, self.stack = count(), ExitStack()
        self.deployment = self.stack.enter_context(
            deployed(folder, 3, partial(owner_settings, folder))
        )

    def close(self) -> None:
        self.stack.close()

    def once(self, draw: random.Random) -> str:
        method, victim, site = (
            draw.choice(WORKERS_METHODS),
            draw.choice(self.victims),
            draw.randrange(3),
        )
        deployment, trial = (
            self.deployment,
            SiteTrial(self.deployment, f"trial{next(self.numbers)}", method, rounds=3),
        )
        run = trial.start()
        trial.wait_for_round(draw.randint(0, 2))
        time.sleep(draw.random() * 5)
        if victim == "a SuperNode":
            deployment.kill(f"site-{site}")
            deployment.start_site(site, **owner_settings(self.folder, site))
        elif victim == "the SuperLink":
            deployment.kill("server")
            deployment.start_server()
            deployment.wait_for_sites(3)
        else:
            app = victim == "the server app"
            for process in (
                deployment.running("server", b"flwr-serverapp") if app else deployment.workers(site)
            ):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        trial.wait(trial.start() if victim in ("the server app", "the SuperLink") else run)
        if set(chain(*trial.absent().values())) - ({site} if victim == "a SuperNode" else set()):
            raise Wrong(f"{method}, {victim} killed: absent were {trial.absent()}")
        try:
            trial.require_same(trial.simulated(trial.absent()))
        except AssertionError as error:
            raise Wrong(f"{method}, {victim} killed: {error}") from error
        return f"{victim} killed{', absent' if trial.absent() else ''}"


def damages_of(content: bytes, draw: random.Random) -> list[tuple[str, bytes]]:
    """Return one random damage of any kind."""
    return [draw.choice(list(damages(content, 4, draw.randrange(1 << 30))))]


# --- inputs ---


class Inputs(Trial):
    """Mutated configurations, expressions, files and exchange messages are read, or refused in one
    line and in time.
    """

    expressions = (
        *EVERY_METHOD,
        "stages(fedprox(mu=0.01):100, fedmr)",
        "ala(fedmr(local=moon(temperature=0.5)), percent=80)",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for text in self.expressions:
            build(text)  # unchanged expressions are valid
        Partition(np.arange(30), np.array([0, 10, 30])).save(folder / "split.npz")
        np.savez(folder / "own.npz", inputs=np.zeros((4, 3), np.float32), labels=np.arange(4))
        write_tensors(folder / "tensors.safetensors", {"model": torch.arange(9.0)}, {"round": "3"})
        (folder / "job.toml").write_text(job("fedavg", "rows"))
        self.files = {path: path.read_bytes() for path in sorted(folder.iterdir())}

    def once(self, draw: random.Random) -> str:
        kind = draw.choice(("expression", "file", "file", "request", "answer"))
        return f"{kind} {bounded(kind, lambda: getattr(self, f'_{kind}')(draw))}"

    def _expression(self, draw: random.Random) -> None:
        text = mutated(draw.choice(self.expressions).encode(), draw).decode(errors="replace")
        parse(text)
        method = build(text)
        if build(str(method)) != method:
            raise Wrong(f"{text!r} is not built again from {str(method)!r}")

    def _file(self, draw: random.Random) -> None:
        path = draw.choice(list(self.files))
        path_mutated = self.folder / f"mutated{path.suffix}"
        path_mutated.write_bytes(mutated(self.files[path], draw))
        if path.suffix == ".toml":
            load(path_mutated)
        elif path.suffix == ".safetensors":
            tensors, metadata = read_tensors(path_mutated)
            if tensors["model"].tolist() != list(range(9)) or metadata != {"round": "3"}:
                raise Wrong(f"{path.name} is read as something else")
        else:
            (Partition.load if path.name == "split.npz" else read_arrays)(path_mutated)

    def _request(self, draw: random.Random) -> None:
        world = World(3)
        world.offer()
        content = mutated(PeerMessage("begin", world.terms()).encode(), draw)
        if not isinstance(world.peers[10].handle(content), bytes):
            raise Wrong("a peer did not answer")
        PeerMessage.decode(content)

    def _answer(self, draw: random.Random) -> None:
        world = World(3)
        world.offer()
        answer = mutated(world.peers[12].handle(PeerMessage("begin", world.terms()).encode()), draw)
        world = World(3)
        world.peers[12].handle = lambda request: answer  # type: ignore[method-assign]
        terms, _ = world.exchange(InMemoryTransport(world.peers))
        if not {10, 11} <= set(terms.peers):
            raise Wrong("a peer with bad answers drove another out")
        PeerMessage.decode(answer, 12)


class Files(Trial):
    """A data set with one damaged file, in any format, is read or refused in one line in time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cache = os.environ.get("FEDLOOM_CACHE")
        os.environ["FEDLOOM_CACHE"] = str(folder / "cache")
        self.sets = Sets(folder / "sets")

    def close(self) -> None:
        os.environ.pop("FEDLOOM_CACHE")
        if self.cache is not None:
            os.environ["FEDLOOM_CACHE"] = self.cache

    def once(self, draw: random.Random) -> str:
        name = draw.choice(list(self.sets.expressions))
        file = draw.choice(self.sets.files(name))
        odd: tuple[Callable[[Path], object], ...] = (Path.mkdir, os.mkfifo)
        content = (
            changed(self.sets.content(name, file), draw)
            if draw.random() < 0.95
            else draw.choice(odd)
        )
        end = bounded(f"{name}, {file.name}", lambda: self.sets.build(name, file, content))
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        return f"{name} {end}"


def bounded(kind: str, read: Callable[[], object]) -> str:
    """Require that an input is read, or refused in one short line, in time and with little memory.

    Raises `Wrong` otherwise.
    """
    began, peak_before = time.monotonic(), peak()
    end = "read"
    try:
        read()
    except (FedloomError, ProtocolViolation) as error:
        end = "refused"
        if "\n" in str(error) or len(str(error)) > 2100:
            raise Wrong(f"{kind}: refused at length: {str(error)[:300]!r}") from error
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"{kind}: {type(error).__name__}: {str(error)[:300]}") from error
    if time.monotonic() - began > SECONDS:
        raise Wrong(f"{kind}: took {time.monotonic() - began:.0f} s")
    if peak() - peak_before > MEBIBYTES:
        raise Wrong(f"{kind}: took {peak() - peak_before} MiB")
    return end


def peak() -> int:
    """Return the peak memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


# --- sites ---


class Strangers(Trial):
    """One or two sites of a federation send bad answers: they are refused by name or bounded, and
    the rounds continue.
    """

    methods = (
        "fedavg",
        "fedavg",
        "quantised(fedavg)",
        "sparse(fedavg, share=0.2)",
        "robust(fedavg)",
        "quantised(robust(fedavg))",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.numbers = count()

    def once(self, draw: random.Random) -> str:
        kind, folder = draw.choice(SITES), self.folder / str(next(self.numbers))
        site, method = kind(draw), draw.choice(self.methods)
        grid = LocalGrid(nodes(CLIENTS, folder), run_config(method, folder / "run", rounds=2))
        federation = flower(grid.run_config, grid)
        liars = draw.sample(list(grid.nodes), site.count)
        for liar in liars:
            if site.only_training:
                grid.nodes[liar].tamper = site.tamper
            else:
                grid.nodes[liar].tamper_all = site.tamper
        numbers = {grid.nodes[liar].config["partition-id"] for liar in liars}
        records: Iterable[dict[str, object]] = [federation.step()[0] for _ in range(2)]
        for record in records:
            faults = {fault["client"]: fault["reason"] for fault in record["faults"]}  # type: ignore[attr-defined]
            if set(faults) - numbers:
                raise Wrong(f"{kind.__name__}, {method}: honest sites were refused: {faults}")
            if site.refused and numbers.intersection(record["clients"]) - set(faults):  # type: ignore[call-overload]
                raise Wrong(f"{kind.__name__} was not refused")
        if not torch.isfinite(federation.model()).all():
            raise Wrong(f"{kind.__name__}, {method}: the model is not finite")
        if not (0 <= int(federation.integers.min()) <= int(federation.integers.max()) < 1000):
            raise Wrong(
                f"{kind.__name__}, {method}: integer buffers became {federation.integers.tolist()}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        return f"{kind.__name__} {'refused' if site.refused else 'bounded'}"


class Noise(Trial):
    """Runs the same round twice over sites with differential privacy.

    The models differ by the noise of both runs. This difference has the promised size, and the seed
    cannot reproduce the noise.
    """

    noise, clip = 2.0, 0.5

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.numbers = count()

    def model(self, method: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model `[P]` after one round with all sites, and their numbers of samples."""
        folder = self.folder / str(next(self.numbers))
        config = run_config(method, folder / "run", rounds=1, model="PlainNet")
        text = config["configuration"].replace("participation = 0.5", "participation = 1.0")
        config["configuration"] = text
        grid = LocalGrid(nodes(CLIENTS, folder), config)
        federation = flower(grid.run_config, grid)
        federation.step()
        shutil.rmtree(folder, ignore_errors=True)
        return federation.model(), federation.task.sizes(torch.arange(CLIENTS)).double()

    def once(self, draw: random.Random) -> str:
        part = draw.choice(("private", "local_private"))
        method = f"{part}(fedavg, noise={self.noise}, clip={self.clip})"
        (first, sizes), (second, _) = self.model(method), self.model(method)
        shares = sizes / sizes.sum()
        spread = 1 / CLIENTS if part == "private" else float(shares.square().sum().sqrt())
        expected = 2**0.5 * self.noise * self.clip * spread
        found = float((first - second).std())
        if not 0.8 < found / expected < 1.25:  # five standard deviations for 650 numbers
            raise Wrong(f"{part}: noise of {found:.3g} where {expected:.3g} is promised")
        return part


# --- resources of a long run ---


def resources(process: int) -> dict[str, int]:
    """Return the resources that must not grow: descriptors, threads and MiB of a process, and files
    in shared memory.
    """
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    return {
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
        "threads": int(status["Threads"]),
        "files in shared memory": sum(
            not name.startswith("sem.") for name in os.listdir("/dev/shm")
        ),
        "MiB": int(status["VmRSS"].split()[0]) >> 10,
    }


class Rounds(Trial):
    """Runs many small rounds of a federation with a worker process; the resources of both must not
    grow.
    """

    rounds = 250
    growth: Mapping[str, int] = {"MiB": 24}  # allowed growth over these rounds

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.engine = ProcessesEngine(small_task(), workers=1)
        schedule = Schedule(rounds=10**9, participation=0.5, seed=3, evaluate_every=50)
        self.federation = Federation(
            KeepsClientMemory(), self.engine.task, self.engine, schedule, folder
        )
        self.step(20)

    def step(self, rounds: int) -> None:
        for _ in range(rounds):
            self.federation.step()
            if self.federation.finished % 10 == 0:
                self.federation.save()

    def once(self, draw: random.Random) -> str:
        processes = (os.getpid(), *self.engine.processes)
        resources_before = [resources(process) for process in processes]
        self.step(self.rounds)
        gc.collect()
        for start, end in zip(
            resources_before, [resources(process) for process in processes], strict=True
        ):
            for name, amount in end.items():
                if amount > start[name] + self.growth.get(name, 0):
                    raise Wrong(
                        f"{name}: {start[name]} before {self.rounds} rounds, {amount} after them"
                    )
        return f"{self.rounds} rounds"

    def close(self) -> None:
        self.engine.close()


TRIALS: dict[str, type[Trial]] = {
    "inputs": Inputs,
    "files": Files,
    "resumptions": Resumptions,
    "strangers": Strangers,
    "noise": Noise,
    "cuts": Cuts,
    "kills": Kills,
    "damages": Damages,
    "workers": Workers,
    "rounds": Rounds,
    "actors": Actors,
    "supernodes": SuperNodes,
}
"""The quickest first: each is tried once before any is repeated."""
