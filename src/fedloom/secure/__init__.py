"""Secure model recombination: clients exchange layers to hide the owner of each layer.

They do so before they train or before they upload. `run_exchange` is the server's side and `Peer` a
client's; a `Transport` carries bytes between them. `rehearse` computes the effect of an exchange
with given choices on rows in a simulation. docs/secure.md describes the protection and its limits.
"""

from fedloom.secure.coordinator import InMemoryTransport, ServerKey, Transport, run_exchange
from fedloom.secure.exchange import (
    Choices,
    Rehearsal,
    Rules,
    rehearse,
    secret_choices,
    stream_choices,
)
from fedloom.secure.faults import SERVER, ExchangeAborted, ProtocolViolation
from fedloom.secure.layers import from_layers, layer_sizes, to_layers
from fedloom.secure.peer import Peer
from fedloom.secure.wire import Terms

__all__ = [
    "SERVER", "Choices", "ExchangeAborted", "InMemoryTransport", "Peer", "ProtocolViolation",
    "Rehearsal", "Rules", "ServerKey", "Terms", "Transport", "from_layers", "layer_sizes",
    "rehearse", "run_exchange", "secret_choices", "stream_choices", "to_layers",
]  # fmt: skip
