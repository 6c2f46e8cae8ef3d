"""The connection of this process to a Ray cluster.

The cluster exists already, or it is started here and ended by its last user.
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

from fedloom.common.errors import FedloomError, InvalidValue, MissingExtra, first_line, quoted
from fedloom.engines.worker_life import import_path

LOCAL = "local"
"""Address of a cluster that is started here, on this machine only."""

PROBE_SECONDS = 5.0
"""Longest wait for a machine to accept a connection."""

SHORT = 38
"""Longest path of the temporary folder for Ray's sockets.

The system allows 107 characters for the whole path of a socket.
"""

_SECURITY = "RAY_AUTH_MODE"

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage statistics
    # Under `uv run`, Ray would send the working directory to every node.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # no warning about the future default
    # No text on standard output when a worker dies: the engine reports it.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".?",
}


_TIME_LIMITS = {
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_agent_register_timeout_ms": "3600000",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "100",
}
"""Longer time limits for clusters that are started here.

By default, Ray restarts a process that has not registered within a minute. This never succeeds on a
machine that needs longer. Ray still detects processes that have died.
"""


@dataclass
class Session:
    """The connection of this process to a cluster.

    Ray allows one connection per process, so all engines of the process share it.

    Attributes:
        address: Address of the cluster.
        started: True if fedloom has made the connection, False if the user's program has.
        folder: Temporary folder of a local cluster.
        security: Previous value of `RAY_AUTH_MODE`. Ray sets it for the whole program.
        users: Number of engines that use the connection.
        raylet: `psutil.Process` of the node of a local cluster.
    """

    address: str
    started: bool
    folder: Path | None = None
    security: str | None = None
    users: int = 1
    raylet: Any = None

    @property
    def died(self) -> bool:
        """True if the local cluster has lost its only node."""
        return self.raylet is not None and not (
            self.raylet.is_running() and self.raylet.status() != "zombie"
        )

    @property
    def local(self) -> bool:
        """True if the cluster was started here, so that only fedloom uses it."""
        return self.started and self.address == LOCAL


_current: Session | None = None

DIED = (
    "the Ray node that was started here has died (its raylet crashed or was killed): repeat the "
    "command to continue from the last checkpoint; if the node dies again, check the free memory "
    "and use fewer workers"
)


def load_ray() -> Any:
    """Import and return the package `ray`. Raises `MissingExtra` if it is not installed."""
    try:
        with _environment(_SETTINGS):  # Ray reads some variables during the import
            import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "engine 'ray'") from None
    return ray


def join(address: str, cpus: int, gpus: int, object_store: int) -> Session:
    """Connect this process to a cluster, or share the existing connection.

    If the user's program is already connected, this connection is used for the addresses `local`
    and `auto`, and `leave` does not close it.

    Args:
        address: `local`, `auto`, `host:port` or `ray://host:port`.
        cpus: Number of cores of a local cluster.
        gpus: Number of GPUs of a local cluster.
        object_store: Bytes for objects on a local cluster.

    Returns:
        The session. Call `leave` once for each call of `join`.

    Raises:
        MissingExtra: If Ray is not installed.
        InvalidValue: If this process is connected to another cluster.
        FedloomError: If the cluster cannot be reached or started.
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
            other = "another Ray cluster" + ("" if _current is None else f" ({_current.address})")
            raise InvalidValue(
                f"engine 'ray' cannot connect to {quoted(address)}: this process is connected to "
                f"{other}"
            )
        _current = Session(address, started=False)
        return _current
    session = Session(address, started=True, security=os.environ.get(_SECURITY))
    environment = _SETTINGS
    options = dict[str, Any]()
    if address == LOCAL:
        # The processes of the cluster inherit these variables.
        environment = {**_SETTINGS, **_TIME_LIMITS, "PYTHONPATH": import_path()}
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "object_store_memory": object_store,
            "include_dashboard": False,
        }
        if len(tempfile.gettempdir()) <= SHORT:
            session.folder = Path(tempfile.mkdtemp(prefix="fedloom-ray-"))
            # Ray makes its folder readable for all users: put it into a private folder.
            options["_temp_dir"] = str(session.folder / "r")
    else:
        _probe(address)
    import psutil  # type: ignore[import-untyped]  # a dependency of Ray

    this = psutil.Process()
    children = this.children()
    try:
        with _environment(environment), _preserved_sigterm():
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
    """Leave the session. The last user ends a connection and a cluster that were started here."""
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
    """Return True if a node of the cluster is large enough for an actor, even if it is busy now.

    Args:
        ray: The package.
        cpus: Number of cores that the actor reserves.
        gpus: Number of GPUs that the actor reserves.

    Returns:
        False if every living node has fewer cores or GPUs in total.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes)


@contextmanager
def _preserved_sigterm() -> Iterator[None]:
    """Restore the program's handler of SIGTERM after the block: Ray replaces it."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if handler is not signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _probe(address: str) -> None:
    """Raise an error at once if no program listens at the address. Ray would wait much longer."""
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
    """Set environment variables inside the block.

    Variables that the user has set remain unchanged, except PYTHONPATH.
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
