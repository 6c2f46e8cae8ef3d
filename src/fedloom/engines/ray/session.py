"""The connection of this process to a Ray cluster: an existing one, or one that is started here and ended by its last user."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import FedloomError, InvalidValue, MissingExtra, first_line, installing, quoted

LOCAL = "local"
"""The address that means a cluster of this machine alone, started here."""

PROBE_SECONDS = 5.0
"""How long to wait for a machine to accept a connection."""

PAUSE = 0.1
"""Seconds between two checks whether a node has registered."""

SHORT = 40
"""Longest path in which Ray can open its sockets: the system allows 107 characters in all."""

_SECURITY = "RAY_AUTH_MODE"

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would report to its makers
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under `uv run` it would send the working directory to every node
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # it warns of what that will be by default
}


_PATIENCE = {
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "3600000",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "100",
}
"""Ray's own time limits, raised on a cluster that is started here. By default Ray ends a process that has not registered within a
minute and starts it again, which never succeeds on a machine that needs longer. A process that dies is noticed all the same."""


@dataclass
class Session:
    """This process's connection to a cluster. Ray allows one connection a process, so all engines in it share it."""

    address: str
    started: bool
    """Whether fedloom made the connection, not the program that uses it."""
    folder: Path | None = None
    security: str | None = None
    """What `RAY_AUTH_MODE` was before: Ray sets it for the whole program."""
    users: int = 1
    raylet: Any = None
    guard: subprocess.Popen[bytes] | None = None

    @property
    def died(self) -> bool:
        """Whether the local cluster has lost its only node."""
        return self.raylet is not None and self.raylet.poll() is not None

    @property
    def local(self) -> bool:
        """Whether the cluster was started here and runs for fedloom alone."""
        return self.started and self.address == LOCAL


_current: Session | None = None

_GO_ON = "the same command goes on from the last checkpoint; if it happens again, look for a lack of memory, take fewer workers"
DIED = f"the Ray node that was started here has died (its raylet crashed or was killed): {_GO_ON}"
_ENDED = f"fedloom: ended together with the Ray node that it started (one of the two crashed or was killed): {_GO_ON}"
_LOST = (
    "fedloom: ended since the Ray cluster at %s was lost (its head, or its node on this machine, crashed or was stopped): "
    "start it again, and the same command goes on from the last checkpoint, at another address too"
)
_GUARD = """
read -r word
[ -n "$word" ] && exit
sleep 1
if { kill -0 "$1" 2>/dev/null || [ -e "/proc/$1" ]; } && ! grep -q "^State:.*Z" "/proc/$1/status" 2>/dev/null; then
    [ $# -lt 4 ] && exit
    "$4" -c "$5" 2>/dev/null && exit
fi
echo "$2" >&2
[ -z "$3" ] || rm -rf "$3"
"""
"""A script that ends with a word. If its writer ended without, and the raylet is dead too, or a zombie, or a probe fails, it says
what it was told to, and removes the node's folder."""


def load_ray() -> Any:
    """The package. Raises `MissingExtra` where it is not installed."""
    try:
        with _environment(_SETTINGS):  # some it reads when it is imported
            import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "engine 'ray'") from None
    return ray


def join(address: str, cpus: int, gpus: int, object_store: int) -> Session:
    """The session at `address`; a local cluster is started with this many cores, GPUs and bytes for objects.

    A connection that the program has made itself serves for the addresses `local` and `auto`, and stays when we leave.
    Raises `MissingExtra`, `InvalidValue` when this process is connected elsewhere, and `FedloomError` in one line when there
    is no cluster or none can be started.
    """
    global _current
    ray = load_ray()
    if not ray.is_initialized():
        _current = None
    if _current is not None and (address == _current.address or (address == "auto" and not _current.local)):
        _current.users += 1
        return _current
    if ray.is_initialized():
        if _current is not None or address not in (LOCAL, "auto"):
            where = "" if _current is None else f" ({_current.address})"
            raise InvalidValue(
                f"engine 'ray' cannot connect to {quoted(address)}: this process is connected to another Ray cluster{where}"
            )
        _current = Session(address, started=False)
        return _current
    _current = _started(ray, cpus, gpus, object_store) if address == LOCAL else _connected(ray, address)
    return _current


def leave(session: Session) -> None:
    """Leave the session. The last user to leave ends the connection, and the cluster, if they were made here."""
    global _current
    session.users -= 1
    if session.users or session is not _current:
        return
    _current = None
    ray = sys.modules.get("ray")
    if session.guard is not None:
        with suppress(OSError):
            session.guard.communicate(b"left\n")
    if session.started and ray is not None and ray.is_initialized():
        ray.shutdown()
        _set(_SECURITY, session.security)
    if session.folder is not None:
        shutil.rmtree(session.folder, ignore_errors=True)


def has_room(ray: Any, cpus: float, gpus: float) -> bool:
    """Whether a node of the cluster is large enough for an actor that needs this much, even if it is busy now."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes)


def _started(ray: Any, cpus: int, gpus: int, object_store: int) -> Session:
    folder, security = None, os.environ.get(_SECURITY)
    if len(tempfile.gettempdir()) <= SHORT:
        folder = Path(tempfile.mkdtemp(prefix="fedloom-ray-"))
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    place = {} if folder is None else {"_temp_dir": str(folder)}
    try:
        # The cluster's processes inherit the environment.
        with _environment({**_SETTINGS, **_PATIENCE, "PYTHONPATH": paths}), _patience_with_nodes(ray), _our_sigterm():
            ray.init(
                address=LOCAL,
                num_cpus=cpus,
                num_gpus=gpus,
                object_store_memory=object_store,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **place,
            )
    except Exception as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise FedloomError(f"engine 'ray' cannot start a cluster here: {first_line(error)}") from error
    _hush()
    raylet = ray._private.worker._global_node.all_processes["raylet"][0].process
    guard = start_guard(raylet.pid, _ENDED, "" if folder is None else str(folder))
    return Session(LOCAL, True, folder, security, raylet=raylet, guard=guard)


def start_guard(raylet: int, message: str, *more: str) -> subprocess.Popen[bytes]:
    """A process that says how to go on, should this one end together with its raylet, and removes the node's folder: when the
    raylet dies, Ray leaves no time to do it here, and when this process is killed, nobody does."""
    command = ["/bin/sh", "-c", _GUARD, "fedloom", str(raylet), message, *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)


@contextmanager
def _our_sigterm() -> Iterator[None]:
    """Ray puts a handler of its own in the place of one there is; without one, its own stays."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _connected(ray: Any, address: str) -> Session:
    _probe(address)
    security = os.environ.get(_SECURITY)
    try:
        with _environment(_SETTINGS), _our_sigterm():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise FedloomError(
                "engine 'ray' finds no cluster on this machine: run `ray start` here, or leave address=auto out"
            ) from error
        hint = " (a cluster that asks for a token needs RAY_AUTH_MODE=token here, and its token)"
        if isinstance(error, ImportError):
            hint = f": {installing('ray')}"
        raise FedloomError(f"engine 'ray' cannot connect to {quoted(address)}: {first_line(error)}{hint}") from error
    _hush()
    return Session(address, started=True, security=security, guard=_guard_of(ray, address))


def _guard_of(ray: Any, address: str) -> subprocess.Popen[bytes] | None:
    """A guard for a cluster that others have started, by its node on this machine, which Ray ends this process with, and by its
    head; none for a client (`ray://`), whose calls fail instead."""
    node = ray._private.worker._global_node
    if node is None or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        with socket.socket(socket.AF_UNIX) as raylet:
            raylet.connect(node.raylet_socket_name)
            found = raylet.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError:
        return None
    host, _, port = node.gcs_address.rpartition(":")
    probe = f"import socket; socket.create_connection(({host.strip('[]')!r}, {port}), {PROBE_SECONDS})"
    return start_guard(struct.unpack("3i", found)[0], _LOST % quoted(address), "", sys.executable, probe)


def _probe(address: str) -> None:
    """Check that something listens at the address: Ray itself would try for half a minute and more."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InvalidValue(
            f"address {quoted(address)} is not allowed: use local, auto, 'host:port' or 'ray://host:port' (with a port number)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FedloomError(f"engine 'ray' cannot reach the cluster at {quoted(address)}: {reason}") from None


def _hush() -> None:
    """Keep Ray from printing a paragraph to standard output when a worker dies: the engine reports that itself."""
    worker: Any = sys.modules.get("ray._private.worker")
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, except those that the user has set (but for PYTHONPATH)."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if name == "PYTHONPATH" or before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


@contextmanager
def _patience_with_nodes(ray: Any) -> Iterator[None]:
    """Inside the block, a new node may take as long to register as its process lives; Ray itself allows 30 seconds."""
    import psutil  # type: ignore[import-untyped]  # Ray brings it along

    services = ray._private.services
    get_node = services.get_node

    def alive(child: Any) -> bool:
        with suppress(psutil.Error):
            return "raylet" in child.name() and child.status() != psutil.STATUS_ZOMBIE
        return False

    def patient(*arguments: Any) -> Any:
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                if not any(alive(child) for child in psutil.Process().children()):
                    raise
            time.sleep(PAUSE)

    services.get_node = patient
    try:
        yield
    finally:
        services.get_node = get_node


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
