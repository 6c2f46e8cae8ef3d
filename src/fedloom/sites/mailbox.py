"""Messages to Flower's nodes, and their replies as they come."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Literal

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

FOREVER = float("inf")

Kind = Literal["hello", "exchange", "train", "evaluate", "end"]

_KINDS = {
    "hello": MessageType.QUERY,
    "exchange": f"{MessageType.QUERY}.exchange",
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
    "end": f"{MessageType.QUERY}.end",
}


class Mailbox:
    """Sends single messages and looks for their replies every `pause` seconds."""

    def __init__(self, grid: Grid, pause: float) -> None:
        self.grid, self.pause = grid, pause

    def nodes(self) -> set[int]:
        """Return the nodes that are connected, as far as Flower knows."""
        return set(self.grid.get_node_ids())

    def send(self, node: int, kind: Kind, content: RecordDict, group: str = "", seconds: float = FOREVER) -> str | None:
        """Send a message that is void after `seconds`. Returns its id, None where Flower could not take it."""
        ttl = None if seconds == FOREVER else seconds
        message = Message(content, node, _KINDS[kind], group_id=group, ttl=ttl)
        # One at a time: the contents of many messages are not in memory at once, and each id is that of its own message.
        ids = list(self.grid.push_messages([message]))
        return ids[0] if ids else None

    def pull(self, ids: Collection[str]) -> list[Message]:
        """Return the replies to these messages that have come since the last look."""
        return list(self.grid.pull_messages(list(ids))) if ids else []

    def collect(self, ids: Collection[str], seconds: float = FOREVER) -> Iterator[Message]:
        """Yield one reply to each of these messages as they come, until all are there or `seconds` have passed."""
        waiting, end = set(ids), time.monotonic() + seconds
        while waiting:
            for reply in self.pull(waiting):
                if reply.metadata.reply_to_message_id in waiting:  # else it came twice, or was asked by nobody
                    waiting.discard(reply.metadata.reply_to_message_id)
                    yield reply
            remaining = end - time.monotonic()
            if waiting and remaining <= 0:
                return
            if waiting:
                time.sleep(min(self.pause, remaining))
