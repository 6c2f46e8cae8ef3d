"""The actors of the Ray engine as their owner sees them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.engines.base import ClientTask
from fedloom.engines.ray.session import Session, first_line, leave


@dataclass(eq=False)
class Hand:
    """An actor, the call it is busy with, and the clients whose answers are waited for (none while it begins)."""

    handle: Any
    call: Any
    task: Any
    share: tuple[ClientTask, ...] | None = None
    ready: bool = False


@dataclass(frozen=True)
class Death:
    """An actor died in a call."""

    reason: str


def ending(error: BaseException) -> str:
    """How an actor ended, in one line of the many that Ray has for it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("creation task" in line for line in lines):
        return lines[-1]
    told = [line for line in lines if line.startswith("The actor is dead because")]
    if any("memory pressure" in line or "low on memory" in line for line in lines):
        return "Ray ended it, since its node ran out of memory"
    return told[0].split(". ")[0].rstrip(".") if told else first_line(error)


def amounts(resources: Mapping[str, float]) -> str:
    """`2 CPU, 0 GPU`."""
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


def kill(ray: Any, hand: Hand) -> None:
    """End an actor, whatever it is doing."""
    try:
        ray.kill(hand.handle)
    except Exception:  # it is dead, or the connection is: nothing remains to be ended
        return


def dismiss(crew: list[Hand], session: Session) -> None:
    """End all actors and give up the session."""
    ray = sys.modules.get("ray")
    while crew:
        hand = crew.pop()
        if ray is not None and ray.is_initialized():
            kill(ray, hand)
    leave(session)
