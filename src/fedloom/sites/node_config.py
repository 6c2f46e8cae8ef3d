"""Configuration of a site's SuperNode (`--node-config`), and the keys that it names."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from pydantic import Field

from fedloom.config.fields import Count, NonNegative, NonNegativeInt, checked
from fedloom.errors import DataError, InvalidValue, RefusedReply
from fedloom.secure.envelopes import PrivateIdentity, PublicIdentity

FEWEST_PEERS = 3
"""Sites that an exchange must have by default: with one other, a peer that tells the server what it
saw leaves no secret.
"""

_Table = TypedDict("_Table", {
    "partition-id": NonNegativeInt, "num-partitions": int, "data": str, "smallest": Count, "memory": str,
    "worker-minutes": NonNegative, "identity": str, "peers": str, "fewest-peers": Annotated[int, Field(ge=2)],
    "choices": Literal["secret", "rehearsed"],
})  # fmt: skip

# of a list of public keys: ecdsa-sha2-nistp384 AAAA... site-0
_LINE = re.compile(rb"(\S+ \S+) site-(\d{1,9})")

_FEDERATION = re.compile(r"[0-9a-f]{16}")


class Identity(NamedTuple):
    """A site's private key, and the public keys of all sites by number."""

    private: PrivateIdentity
    public_keys: Mapping[int, PublicIdentity]


@dataclass(frozen=True)
class NodeConfig:
    """A SuperNode's configuration, such as `"partition-id=0 num-partitions=3 data='/srv/data'
    memory='/srv/memory'"`.

    `number` (partition-id) is which client the site is, and `sites` (num-partitions) how many there
    are. A site without `data` of its own takes its client's share of the configuration's. `memory`
    is by default `fedloom` under FLWR_HOME or ~/.flwr. With `choices='rehearsed'` the site
    exchanges layers as a simulation with the run's seed does, which hides nothing.
    """

    number: int
    sites: int | None
    data: str | None
    memory: Path
    identity: Identity | None
    rehearsed: bool
    fewest_peers: int
    smallest: int = 5

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "NodeConfig":
        """Check a node configuration. Raises `InvalidValue`, or `DataError` for unreadable files,
        in one line.
        """
        values = checked(
            _Table,
            {k: table[k] for k in _Table.__annotations__ if k in table},
            "node configuration: ",
        )
        if (number := values.get("partition-id")) is None:
            raise InvalidValue("node configuration: partition-id is missing, the site's number")
        home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
        return cls(
            number,
            values.get("num-partitions"),
            values.get("data") or None,
            Path(values.get("memory") or home / "fedloom").expanduser(),
            _identity(values.get("identity"), values.get("peers"), number),
            values.get("choices") == "rehearsed",
            values.get("fewest-peers", FEWEST_PEERS),
            values.get("smallest", 5),
        )

    def folder(self, federation: object) -> Path:
        """Return the site's folder for one federation. Raises `RefusedReply` for a name that could
        lead elsewhere.
        """
        if not isinstance(federation, str) or not _FEDERATION.fullmatch(federation):
            raise RefusedReply(f"{federation!r:.40} is not the name of a federation")
        return self.memory / federation


def _identity(private: str | None, peers: str | None, number: int) -> Identity | None:
    """Read the site's identity from the files that are named; None where none is."""
    if not private and not peers:
        return None
    if not private or not peers:
        raise InvalidValue(
            "node configuration: identity and peers go together: a key file and a list of public keys"
        )
    key, public_keys = (
        read_private(Path(private).expanduser()),
        read_peers(Path(peers).expanduser()),
    )
    if number not in public_keys:
        raise InvalidValue(f"{peers} lists no site-{number}, which is this site (partition-id)")
    if public_keys[number] != key.public_key():
        raise InvalidValue(
            f"{private} is not the key that {peers} lists for site-{number}, this site"
        )
    return Identity(key, public_keys)


def read_private(path: Path) -> PrivateIdentity:
    """Read a private key in PEM or OpenSSH's format, without a password. Raises `InvalidValue` for
    anything else.
    """
    content = read_content(path)
    load = load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key
    try:
        key = load(content, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, (ec.EllipticCurvePrivateKey, Ed25519PrivateKey)):
        raise InvalidValue(
            f"{path} is not a private key, elliptic curve or Ed25519, without a password"
        )
    return key


def read_peers(path: Path) -> dict[int, PublicIdentity]:
    """Read a list of public keys, by the number of the site. Raises `InvalidValue` naming the line
    that does not fit.
    """
    public_keys: dict[int, PublicIdentity] = {}
    for number, line in enumerate(read_content(path).splitlines(), start=1):
        if not line.strip() or line.startswith(b"#"):
            continue
        match = _LINE.fullmatch(line.strip())
        try:
            key = load_ssh_public_key(match[1]) if match else None
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if match is None or not isinstance(key, (ec.EllipticCurvePublicKey, Ed25519PublicKey)):
            raise InvalidValue(
                f"{path}: line {number} is not a public key followed by site-<number>"
            )
        site = int(match[2])
        if site in public_keys or key in public_keys.values():
            raise InvalidValue(f"{path}: line {number} lists site-{site}, or its key, again")
        public_keys[site] = key
    if not public_keys:
        raise InvalidValue(f"{path} lists no public key")
    return public_keys


def read_content(path: Path) -> bytes:
    """Return the bytes of a file. Raises `DataError` where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
