"""This process's connection to a Ray cluster: an existing one, or one that is started here and
ended by its last user.
"""

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.engines.worker_life import import_path
from fedloom.errors import FedloomError, InvalidValue, MissingExtra, first_line, quoted

LOCAL = "local"
"""Address of a cluster of this machine alone, started here."""

PROBE_SECONDS = 5.0
"""Longest wait for a machine to accept a connection."""

SHORT = 38
"""Longest path of the temporary folder in which Ray can open its sockets: the system allows 107
characters in all.
"""

_SECURITY = "RAY_AUTH_MODE"

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to its makers
    # under `uv run` it would send the working directory to every node
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no warning about its future default
    # no paragraph on standard output when a worker dies: the engine reports that itself
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".?",
}


_PATIENCE = {
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "3600000",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "100",
}
"""Ray's time limits, raised on a cluster that is started here. By default Ray ends a process that
has not registered within a minute and starts it again, which never succeeds on a machine that needs
longer. The death of a process is still noticed.
"""


@dataclass
class Session:
    """This process's connection to a cluster. Ray allows one connection a process, so all engines
    in it share it.
    """

    address: str
    started: bool  # by fedloom, not by the program that uses it
    folder: Path | None = None
    security: str | None = None  # `RAY_AUTH_MODE` before: Ray sets it for the whole program
    users: int = 1
    raylet: Any = None  # its `psutil.Process`, on a local cluster

    @property
    def died(self) -> bool:
        """True if the local cluster has lost its only node."""
        return self.raylet is not None and not (
            self.raylet.is_running() and self.raylet.status() != "zombie"
        )

    @property
    def local(self) -> bool:
        """True if the cluster was started here and runs for fedloom alone."""
        return self.started and self.address == LOCAL


_current: Session | None = None

DIED = (
    "the Ray node that was started here has died (its raylet crashed or was killed): the same command goes on from the last "
    "checkpoint; if it happens again, look for a lack of memory, take fewer workers"
)


def load_ray() -> Any:
    """Import and return the package `ray`. Raises `MissingExtra` if it is not installed."""
    try:
        with _environment(_SETTINGS):  # Ray reads some of them when it is imported
            import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "engine 'ray'") from None
    return ray


def join(address: str, cpus: int, gpus: int, object_store: int) -> Session:
    """Join the cluster at `address`; a local one is started with this many cores, GPUs and bytes
    for objects.

    A connection that the program made itself serves the addresses `local` and `auto` and outlives
    the session. Raises `MissingExtra`, `InvalidValue` in a process of another cluster,
    `FedloomError` if none is there or can be started.
    """
    global _current
    ray = load_ray()
    if not ray.is_initialized():
        _current = None
    if _current is not None and (
        address == _current.address or (address == "auto" and not _current.local)
    ):
        _current.users += 1
        return _current
    if ray.is_initialized():
        if _current is not None or address not in (LOCAL, "auto"):
            present = "another Ray cluster" + ("" if _current is None else f" ({_current.address})")
            raise InvalidValue(
                f"engine 'ray' cannot connect to {quoted(address)}: this process is connected to {present}"
            )
        _current = Session(address, started=False)
        return _current
    session = Session(address, started=True, security=os.environ.get(_SECURITY))
    environment, options = _SETTINGS, dict[str, Any]()
    if address == LOCAL:
        # the cluster's processes inherit it
        environment = {**_SETTINGS, **_PATIENCE, "PYTHONPATH": import_path()}
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "object_store_memory": object_store,
            "include_dashboard": False,
        }
        if len(tempfile.gettempdir()) <= SHORT:
            session.folder = Path(tempfile.mkdtemp(prefix="fedloom-ray-"))
            # Ray opens its folder to everybody, so it gets one inside a folder of this user alone.
            options["_temp_dir"] = str(session.folder / "r")
    else:
        _probe(address)
    import psutil  # type: ignore[import-untyped]  # Ray brings it along

    this = psutil.Process()
    children = this.children()
    try:
        with _environment(environment), _our_sigterm():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        leave(session)
        action = "start a cluster here" if address == LOCAL else f"connect to {quoted(address)}"
        raise FedloomError(f"engine 'ray' cannot {action}: {first_line(error)}") from error
    session.raylet = next(
        (child for child in this.children() if child not in children and "raylet" in child.name()),
        None,
    )
    _current = session
    return session


def leave(session: Session) -> None:
    """Leave the session. The last user ends the connection and the cluster, if they were made here."""
    global _current
    session.users -= 1
    if session.users:
        return
    if session is _current:
        _current = None
        ray = sys.modules.get("ray")
        if session.started and ray is not None and ray.is_initialized():
            ray.shutdown()
            _set(_SECURITY, session.security)
    if session.folder is not None:
        shutil.rmtree(session.folder, ignore_errors=True)


def has_room(ray: Any, cpus: float, gpus: float) -> bool:
    """Return True if a node of the cluster is large enough for an actor that needs this much, even
    if it is busy now.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes)


@contextmanager
def _our_sigterm() -> Iterator[None]:
    """Put back the program's handler of SIGTERM, if it has one: Ray replaces it."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _probe(address: str) -> None:
    """Raise unless something listens at the address: Ray itself would try for half a minute and
    more.
    """
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        allowed = "local, auto, 'host:port' or 'ray://host:port' (with a port number)"
        raise InvalidValue(f"address {quoted(address)} is not allowed: use {allowed}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FedloomError(
            f"engine 'ray' cannot reach the cluster at {quoted(address)}: {reason}"
        ) from None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, except those that the user has set (but for
    PYTHONPATH).
    """
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(
        {
            name: value
            for name, value in values.items()
            if name == "PYTHONPATH" or previous[name] is None
        }
    )
    try:
        yield
    finally:
        for name, value in previous.items():
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
