"""Violations of an exchange's protocol, by name."""

from fedloom.common.errors import FedloomError
from fedloom.common.fields import require_one_of

SERVER = -1
"""Number of the server in a fault."""

KINDS = {
    "left": "stopped answering",
    "impostor": "is not authenticated: its keys are not signed by its known identity",
    "altered": "a letter from it was altered",
    "damaged": "a letter from it cannot be read",
    "replayed": "a letter from it belongs to another stage or exchange",
    "disagrees": "uses other terms: other rules, peers, keys or layers, or another server key",
    "misdirected": "a letter from it was delivered to the wrong peer",
    "duplicated": "a message from it arrived twice",
    "missing": "a message that it announced or owes did not arrive",
    "unannounced": "it sent more than it announced or owes",
    "invalid": "its message does not fit the exchange",
    "spoilt": "its sealed content cannot be opened, or does not fit the exchange",
    "unproved": "accuses without proof",
    "withdrew": "left the exchange, since it refuses a request of the server",
}


class ProtocolViolation(FedloomError):
    """A peer, or the carrier between peers, broke the exchange.

    The report of a `witness` may be false.

    Attributes:
        kind: A key of `KINDS`.
        peer: Number of the peer that is at fault.
        detail: Further text.
        witness: Number of the peer that reported it, or None.
    """

    def __init__(self, kind: str, peer: int, detail: str = "", witness: int | None = None) -> None:
        require_one_of("kind", kind, tuple(KINDS))
        self.kind = kind
        self.peer = peer
        self.detail = detail
        self.witness = witness
        name = "the server" if peer == SERVER else f"peer {peer}"
        details = f" ({detail})" if detail else ""
        source = "" if witness is None else f", reported by peer {witness}"
        super().__init__(f"{name}: {KINDS[kind]}{details}{source}")


class ExchangeAborted(FedloomError):
    """The exchange was aborted, and every peer has its previous model.

    `faults` contain the reasons.
    """

    def __init__(self, faults: list[ProtocolViolation], remaining: int, fewest: int) -> None:
        self.faults = faults
        reason = f": {faults[-1]}" if faults else ""
        super().__init__(
            f"exchange aborted with {remaining} of at least {fewest} peers left{reason}"
        )
