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
        """The nodes that are connected, as far as Flower knows."""
        return set(self.grid.get_node_ids())

    def send(
        self,
        node: int,
        kind: Kind,
        content: RecordDict,
        group: str = "",
        seconds: float = FOREVER,
    ) -> str | None:
        """The id by which the reply is known; None where Flower could not take the message. After `seconds` it is void."""
        ttl = None if seconds == FOREVER else seconds
        message = Message(content, node, _KINDS[kind], group_id=group, ttl=ttl)
        # One at a time: what many messages hold is not in memory at once, and each id is that of its own message.
        sent = list(self.grid.push_messages([message]))
        return sent[0] if sent else None

    def pull(self, sent: Collection[str]) -> list[Message]:
        """The replies to these messages that are there now. Each comes once."""
        return list(self.grid.pull_messages(list(sent))) if sent else []

    def collect(self, sent: Collection[str], seconds: float = FOREVER) -> Iterator[Message]:
        """The replies as they come, until all are there or `seconds` have passed."""
        waiting, end = set(sent), time.monotonic() + seconds
        while waiting:
            for reply in self.pull(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply
            left = end - time.monotonic()
            if waiting and left <= 0:
                return
            if waiting:
                time.sleep(min(self.pause, left))
