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

from fedloom.common.errors import DataError, InvalidValue, RefusedReply
from fedloom.common.fields import Count, NonNegative, NonNegativeInt, checked
from fedloom.secure.envelopes import PrivateIdentity, PublicIdentity

FEWEST_PEERS = 3
"""Default for the smallest number of sites in an exchange.

With only one other site, that peer could report its observations to the server, and no secret would
remain.
"""

_Table = TypedDict("_Table", {
    "partition-id": NonNegativeInt, "num-partitions": int, "data": str, "smallest": Count,
    "memory": str, "worker-minutes": NonNegative, "identity": str, "peers": str,
    "fewest-peers": Annotated[int, Field(ge=2)], "choices": Literal["secret", "rehearsed"],
})  # fmt: skip

# a line of a list of public keys: ecdsa-sha2-nistp384 AAAA... site-0
_LINE = re.compile(rb"(\S+ \S+) site-(\d{1,9})")

_FEDERATION = re.compile(r"[0-9a-f]{16}")


class Identity(NamedTuple):
    """A site's private key, and the public keys of all sites by number."""

    private: PrivateIdentity
    public_keys: Mapping[int, PublicIdentity]


@dataclass(frozen=True)
class NodeConfig:
    """A SuperNode's configuration.

    For example `"partition-id=0 num-partitions=3 data='/srv/data' memory='/srv/memory'"`.

    Attributes:
        number: Client number of the site (partition-id).
        sites: Number of sites (num-partitions).
        data: Path or function of the site's data; None takes the client's share of the
            configuration's data.
        memory: Folder of the site's memory; by default `fedloom` under FLWR_HOME or ~/.flwr.
        identity: Keys for exchanges.
        rehearsed: With `choices='rehearsed'` the site exchanges layers as a simulation with the
            run's seed does, which hides nothing.
        fewest_peers: Smallest number of sites in an exchange.
        smallest: Smallest number of rows in a statistic.
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
        """Check a node configuration.

        Raises:
            InvalidValue: A value is not allowed; the text is one line.
            DataError: A file of keys cannot be read.
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
        """Return the site's folder for one federation.

        Raises:
            RefusedReply: The name could lead to another folder.
        """
        if not isinstance(federation, str) or not _FEDERATION.fullmatch(federation):
            raise RefusedReply(f"{federation!r:.40} is not the name of a federation")
        return self.memory / federation


def _identity(private: str | None, peers: str | None, number: int) -> Identity | None:
    """Read the site's identity from the named files; None if no file is named."""
    if not private and not peers:
        return None
    if not private or not peers:
        raise InvalidValue(
            "node configuration: set both identity and peers: a key file and a list of public keys"
        )
    key = read_private(Path(private).expanduser())
    public_keys = read_peers(Path(peers).expanduser())
    if number not in public_keys:
        raise InvalidValue(f"{peers} lists no site-{number}, the key of this site (partition-id)")
    if public_keys[number] != key.public_key():
        raise InvalidValue(
            f"{private} is not the key that {peers} lists for site-{number}, this site"
        )
    return Identity(key, public_keys)


def read_private(path: Path) -> PrivateIdentity:
    """Read a private key in PEM or OpenSSH's format, without a password.

    Raises:
        InvalidValue: The file contains no such key.
        DataError: The file cannot be read.
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
    """Read a list of public keys, by the number of the site.

    Raises:
        InvalidValue: A line is not valid; the text gives its number.
        DataError: The file cannot be read.
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
            raise InvalidValue(f"{path}: line {number} repeats site-{site} or its key")
        public_keys[site] = key
    if not public_keys:
        raise InvalidValue(f"{path} lists no public key")
    return public_keys


def read_content(path: Path) -> bytes:
    """Return the bytes of a file.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
