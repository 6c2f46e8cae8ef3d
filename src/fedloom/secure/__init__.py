"""Secure model recombination: clients exchange layers before they train or upload, so that nobody
knows whose a layer is.

`run_exchange` is the server's side and `Peer` a client's; a `Transport` carries bytes between them.
`rehearse` says what an exchange with given choices does to rows in a simulation. What is protected,
and what is not: docs/secure.md.
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
    "Rehearsal", "Rules", "ServerKey", "Terms", "Transport", "from_layers", "layer_sizes", "rehearse", "run_exchange",
    "secret_choices", "stream_choices", "to_layers",
]  # fmt: skip
