"""The connection of this process to a Ray cluster: joined, or started here and taken down by who uses it last."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.errors import FedloomError, InvalidValue, MissingExtra, installing

LOCAL = "local"
"""The address that means a cluster of this machine alone, started here."""

PROBE_SECONDS = 5.0
"""A machine that takes no connection for so long is not there."""

PAUSE = 0.1
"""Seconds between two looks whether a node has registered."""

SHORT = 40
"""Characters that a path may have under which Ray opens its sockets: the system takes no more than 107 in all."""

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
"""On a cluster that is started here. Ray ends processes that have not registered in a minute and starts them again, for ever on a
machine that needs longer; one that has died is noticed all the same."""


@dataclass
class Session:
    """What a process has of a cluster; Ray knows one connection a process, so all engines in it share this."""

    address: str
    started: bool
    """Whether it was made here, not by the program that uses fedloom."""
    folder: Path | None = None
    security: str | None = None
    """What `RAY_AUTH_MODE` was before: Ray sets it for the whole program."""
    users: int = 1

    @property
    def local(self) -> bool:
        """Whether the cluster was started here, for fedloom alone."""
        return self.started and self.address == LOCAL


_current: Session | None = None


def load_ray() -> Any:
    """The package. Raises `MissingExtra` where it is not installed."""
    try:
        with _environment(_SETTINGS):  # some it reads when it is imported
            import ray
    except ImportError:
        raise MissingExtra("ray", "ray", "engine 'ray'") from None
    return ray


def join(address: str, processors: int, graphics: int, object_store: int) -> Session:
    """The session at `address`; a local cluster is started with so many processors, GPUs and bytes for objects.

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
                f"engine 'ray' cannot connect to {address!r}: this process is connected to another Ray cluster{where}"
            )
        _current = Session(address, started=False)
        return _current
    _current = _started(ray, processors, graphics, object_store) if address == LOCAL else _connected(ray, address)
    return _current


def leave(session: Session) -> None:
    """Give the session up. The last to do so takes down what was made here."""
    global _current
    session.users -= 1
    if session.users or session is not _current:
        return
    _current = None
    ray = sys.modules.get("ray")
    if session.started and ray is not None and ray.is_initialized():
        ray.shutdown()
        _set(_SECURITY, session.security)
    if session.folder is not None:
        shutil.rmtree(session.folder, ignore_errors=True)


def first_line(error: BaseException) -> str:
    """What an error says, as one line that is not too long."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if len(text) <= 200 else text[:200] + "..."


def _started(ray: Any, processors: int, graphics: int, object_store: int) -> Session:
    folder, security = None, os.environ.get(_SECURITY)
    if len(tempfile.gettempdir()) <= SHORT:
        folder = Path(tempfile.mkdtemp(prefix="fedloom-ray-"))
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    place = {} if folder is None else {"_temp_dir": str(folder)}
    try:
        # The cluster's processes inherit the environment.
        with _environment({**_SETTINGS, **_PATIENCE, "PYTHONPATH": paths}), _patience_with_nodes(ray):
            ray.init(
                address=LOCAL,
                num_cpus=processors,
                num_gpus=graphics,
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
    return Session(LOCAL, started=True, folder=folder, security=security)


def _connected(ray: Any, address: str) -> Session:
    _probe(address)
    security = os.environ.get(_SECURITY)
    try:
        with _environment(_SETTINGS):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        if address == "auto" and isinstance(error, ConnectionError):
            raise FedloomError(
                "engine 'ray' finds no cluster on this machine: run `ray start` here, or leave address=auto out"
            ) from error
        hint = " (a cluster that asks for a token needs RAY_AUTH_MODE=token here, and its token)"
        if isinstance(error, ImportError):
            hint = f": {installing('ray')}"
        raise FedloomError(f"engine 'ray' cannot connect to {address!r}: {first_line(error)}{hint}") from error
    _hush()
    return Session(address, started=True, security=security)


def _probe(address: str) -> None:
    """Ray itself would try a machine that is not there for half a minute and more."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise InvalidValue(
            f"address {address!r} is not allowed: use local, auto, 'host:port' or 'ray://host:port' (with a port number)"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FedloomError(f"engine 'ray' cannot reach the cluster at {address!r}: {reason}") from None


def _hush() -> None:
    """Ray prints a paragraph to standard output when a worker dies; the engine deals with that and says so itself."""
    worker: Any = sys.modules.get("ray._private.worker")
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables set for a moment; what the user has set beforehand (PYTHONPATH aside) stays."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if name == "PYTHONPATH" or before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


@contextmanager
def _patience_with_nodes(ray: Any) -> Iterator[None]:
    """Ray gives up a node that has not registered in half a minute. Inside, a node has time as long as its process lives."""
    services = ray._private.services
    get_node = services.get_node

    def patient(*arguments: Any) -> Any:
        import psutil  # type: ignore[import-untyped]  # Ray brings it along

        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:
                states = [child.status() for child in psutil.Process().children() if "raylet" in child.name()]
                if not set(states) - {psutil.STATUS_ZOMBIE}:
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
