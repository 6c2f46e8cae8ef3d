"""A site's answers to messages, and its worker process.

Each SuperNode and run has one worker. It stores PyTorch and the task in memory, while Flower starts
a new process for each message. That process loads neither. It starts the worker if necessary, and
hands the message over through a Unix socket, as bytes that are never unpickled. The socket is in a
folder that only the site's user can open; a secret in this folder authenticates both sides. If
anything fails, the process answers the message itself, since the site's memory is on disk.
"""

import logging
import os
import secrets
import shutil
import stat
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.common import serde
from flwr.proto.message_pb2 import Context as ContextBytes
from flwr.proto.message_pb2 import Message as MessageBytes
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictBytes

from fedloom.common.digest import digest
from fedloom.common.errors import FedloomError, one_line
from fedloom.engines.worker_life import exit_unless, start_python
from fedloom.sites.messages import ARRAYS, PARCEL, Refusal, pack, parcel_of, tensors_of, words_of
from fedloom.state.files import write_bytes

IDLE_MINUTES = 5
"""Minutes that a worker waits for another message, unless the site sets `worker-minutes`."""

_STARTING = 60.0  # seconds until a worker must listen

_LONGEST_FOLDER = 70  # bytes: the path of a socket may take 107 on Linux, 103 on macOS

_logger = logging.getLogger("flwr.fedloom")


def answer(message: Message, context: Context) -> RecordDict:
    """Return the site's answer to a message.

    Args:
        message: The message.
        context: The site's configuration.

    Returns:
        The answer, or the reason for refusing in one line; the site's log contains more.
    """
    try:
        words = words_of(message, ARRAYS, PARCEL)
        # imports PyTorch, which the process of a single message does not need
        from fedloom.sites.site import Site

        site = Site.of(context.run_config, context.node_config)
        tensors = tensors_of(message)
        match message.metadata.message_type:
            case "query":
                return site.hello(words)
            case "query.statistics":
                return site.statistics(words)
            case "query.exchange":
                return site.exchange(words, tensors, parcel_of(message))
            case "train":
                return site.train(words, tensors)
        return site.evaluate(words, tensors)
    except Refusal as refusal:
        words = {**refusal.words, "refused": str(refusal)}
    except FedloomError as error:
        words = {"refused": one_line(str(error))}
    except Exception as error:
        _logger.exception("this site could not answer")
        words = {"refused": one_line(f"{type(error).__name__}: {error}")}
    _logger.error("%s", words["refused"])
    return pack(words)


# --- in the process that Flower starts for a message ---


def handed_over(message: Message, context: Context) -> RecordDict | None:
    """Return the worker's answer to a message.

    None if no worker answers: then this process must answer.

    Args:
        message: The server's message.
        context: Flower's context; `worker-minutes` of its node configuration is the idle time of a
            worker, 0 for no worker.

    Returns:
        The content of the answer, or None.
    """
    superexec = _superexec()
    minutes = context.node_config.get("worker-minutes", IDLE_MINUTES)
    if superexec is None or not isinstance(minutes, (int, float)) or not minutes > 0:
        return None
    try:
        folder = _folder(context, superexec)
        with _connected(folder) or _started(folder, superexec, 60 * minutes) as worker:
            worker.send_bytes(serde.context_to_proto(context).SerializeToString())
            worker.send_bytes(serde.message_to_proto(message).SerializeToString())
            return serde.recorddict_from_proto(RecordDictBytes.FromString(worker.recv_bytes()))
    except Exception as error:
        _logger.warning("without a worker: %s", error or type(error).__name__)
        return None


def _superexec() -> int | None:
    """Return the id of the process that started this one for a single message.

    None for other processes, or if Flower installs dependencies for each message.
    """
    program, *arguments = sys.argv
    if Path(program).name != "flwr-clientapp" or "--parent-pid" not in arguments:
        return None
    if "--allow-runtime-dependency-installation" in arguments:
        return None
    return int(arguments[arguments.index("--parent-pid") + 1])


def _folder(context: Context, superexec: int) -> Path:
    """Return the worker's folder, one for each run at a SuperNode.

    A restarted SuperNode gets another folder.
    """
    temporary = tempfile.gettempdir()
    name = digest(f"{context.run_id} {context.node_id} {superexec} {temporary}")
    if len(os.fsencode(temporary)) > _LONGEST_FOLDER:
        temporary = "/tmp"
    return Path(temporary) / f"fedloom-{name[:16]}"


def _connected(folder: Path) -> Connection | None:
    """Connect to the worker in `folder`; return None if no worker listens.

    Raises:
        PermissionError: Other users can access the folder.
    """
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} must be accessible only to this user")
    try:
        return Client(str(folder / "socket"), "AF_UNIX", authkey=(folder / "secret").read_bytes())
    except (OSError, EOFError, AuthenticationError):
        return None


def _started(folder: Path, superexec: int, seconds: float) -> Connection:
    """Start a worker and connect to it.

    Raises:
        OSError: The worker does not start.
    """
    shutil.rmtree(folder, ignore_errors=True)  # a killed worker leaves its folder
    worker = start_python(
        ["-u", "-m", __spec__.name, str(folder), str(superexec), str(seconds)], {}
    )
    end = time.monotonic() + _STARTING
    while worker.poll() is None and time.monotonic() < end:
        connection = _connected(folder)
        if connection is not None:
            return connection
        time.sleep(0.02)
    raise ChildProcessError("the site's worker did not start")


# --- in the worker ---


def work(folder: Path, superexec: int, seconds: float) -> None:
    """Create a socket in `folder`, and answer the messages that arrive there.

    The worker ends with its SuperExec. It also ends, unless it is busy, if its folder was removed
    or no message has arrived for too long. If a message arrives at that moment, the process that
    brought it answers it.

    Args:
        folder: Folder of the socket and the secret; it must not exist.
        superexec: Id of Flower's process that starts a process for each message.
        seconds: Longest time without a message.
    """
    secret = secrets.token_bytes(32)
    working = False
    since = time.monotonic()

    def needed() -> bool:
        mine = False
        with suppress(OSError):
            mine = (folder / "secret").read_bytes() == secret
            os.kill(superexec, 0)  # raises if the process has ended
            if working or (mine and time.monotonic() < since + seconds):
                return True
        if mine:
            shutil.rmtree(folder, ignore_errors=True)
        return False

    folder.mkdir(mode=0o700)
    with Listener(str(folder / "socket"), "AF_UNIX", backlog=8, authkey=secret) as listener:
        (folder / "socket").chmod(0o600)
        write_bytes(folder / "secret", secret, mode=0o600)  # it allows to connect
        # may end in the middle of a message, since files are written whole or not at all
        exit_unless(needed)
        while True:
            try:
                with listener.accept() as connection:
                    working = True
                    context, message = (connection.recv_bytes() for _ in range(2))
                    answered = answer(
                        serde.message_from_proto(MessageBytes.FromString(message)),
                        serde.context_from_proto(ContextBytes.FromString(context)),
                    )
                    connection.send_bytes(serde.recorddict_to_proto(answered).SerializeToString())
            except Exception as error:
                _logger.warning("the site's worker: %s", error or type(error).__name__)
            working = False
            since = time.monotonic()


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
