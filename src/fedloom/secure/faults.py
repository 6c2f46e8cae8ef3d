"""Violations of an exchange's protocol, by name."""

from fedloom.config.fields import require_one_of
from fedloom.errors import FedloomError

SERVER = -1
"""The server's number where a fault names it."""

KINDS = {
    "left": "stopped answering",
    "impostor": "is not who it says: its keys are not signed by the identity known for it",
    "altered": "a letter from it was altered",
    "damaged": "a letter from it cannot be read",
    "replayed": "a letter from it belongs to another stage or exchange",
    "disagrees": "takes part on other terms: other rules, peers, keys or layers, or another server key",
    "misdirected": "a letter from it was brought to the wrong peer",
    "duplicated": "something from it came twice",
    "missing": "something that it announced or owes did not come",
    "unannounced": "it sent more than it announced or owes",
    "invalid": "what it sent does not fit the exchange",
    "spoilt": "what it sealed cannot be opened, or does not fit the exchange",
    "unproved": "accuses without proof",
    "withdrew": "takes no part any more, since it refuses what the server asks",
}


class ProtocolViolation(FedloomError):
    """A `peer`, or the carrier between, broke the exchange in a way of `KINDS`; a `witness` who
    noticed it may lie.
    """

    def __init__(self, kind: str, peer: int, detail: str = "", witness: int | None = None) -> None:
        require_one_of("kind", kind, tuple(KINDS))
        self.kind, self.peer, self.detail, self.witness = kind, peer, detail, witness
        name = "the server" if peer == SERVER else f"peer {peer}"
        details = f" ({detail})" if detail else ""
        source = "" if witness is None else f", says peer {witness}"
        super().__init__(f"{name}: {KINDS[kind]}{details}{source}")


class ExchangeAborted(FedloomError):
    """The exchange did not happen; every peer has the model that it had before. `faults` says why."""

    def __init__(self, faults: list[ProtocolViolation], remaining: int, fewest: int) -> None:
        self.faults = faults
        reason = f": {faults[-1]}" if faults else ""
        super().__init__(
            f"exchange aborted with {remaining} of at least {fewest} peers left{reason}"
        )
