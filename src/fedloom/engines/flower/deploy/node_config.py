"""Who a site is to the other sites in a secure exchange: its own key, and everybody's public ones, from files that it was given.

The list of public keys has a line for each site, as `fedloom flower keys` writes them to `site-<i>/peers.pub`:

    ecdsa-sha2-nistp384 AAAA... site-0
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from fedloom.errors import InvalidValue
from fedloom.secure.envelopes import PrivateIdentity, PublicIdentity

_LINE = re.compile(rb"(\S+ \S+) site-(\d{1,9})")


@dataclass(frozen=True)
class Identity:
    """A site's private key and the public keys of all sites, by number. `rehearsed`: its choices are those of a simulation, by
    the run's seed, and hide nothing."""

    private: PrivateIdentity
    known: Mapping[int, PublicIdentity]
    rehearsed: bool = False

    @classmethod
    def of(cls, node_config: Mapping[str, Any], number: int) -> Identity | None:
        """The identity of site `number` as its SuperNode names it, None where it names none.

        Raises `InvalidValue` for files that cannot be read, or a key that is not the one listed for this site.
        """
        for key in ("identity", "peers", "choices"):
            if not isinstance(node_config.get(key, ""), str):
                raise InvalidValue(f"node configuration: {key} must be text, not {node_config[key]!r}")
        paths = [node_config.get(key) for key in ("identity", "peers")]
        choices = node_config.get("choices", "secret")
        if choices not in ("secret", "rehearsed"):
            raise InvalidValue(f"node configuration: choices must be 'secret' or 'rehearsed', not {choices!r:.40}")
        if not any(paths):
            return None
        if not all(paths):
            raise InvalidValue(
                "node configuration: identity and peers go together: a key file and a list of public keys"
            )
        private, known = read_private(Path(str(paths[0])).expanduser()), read_peers(Path(str(paths[1])).expanduser())
        if number not in known:
            raise InvalidValue(f"{paths[1]} lists no site-{number}, which is this site (partition-id)")
        if _bytes(known[number]) != _bytes(private.public_key()):
            raise InvalidValue(f"{paths[0]} is not the key that {paths[1]} lists for site-{number}, this site")
        return cls(private, known, choices == "rehearsed")


def read_private(path: Path) -> PrivateIdentity:
    """A private key in OpenSSH's format, without a password. Raises `InvalidValue` for anything else."""
    content = _content(path)
    try:
        key = load_ssh_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, (ec.EllipticCurvePrivateKey, Ed25519PrivateKey)):
        raise InvalidValue(
            f"{path} is not a private key, elliptic curve or Ed25519, in OpenSSH's format and without a password"
        )
    return key


def read_peers(path: Path) -> dict[int, PublicIdentity]:
    """The public keys in a list, by the number of the site. Raises `InvalidValue` naming the line that is none, or the site
    that is listed twice or has another's key."""
    found: dict[int, PublicIdentity] = {}
    for number, line in enumerate(_content(path).splitlines(), start=1):
        if not line.strip() or line.startswith(b"#"):
            continue
        match = _LINE.fullmatch(line.strip())
        try:
            key = load_ssh_public_key(match[1]) if match else None
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if match is None or not isinstance(key, (ec.EllipticCurvePublicKey, Ed25519PublicKey)):
            raise InvalidValue(f"{path}: line {number} is not a public key followed by site-<number>")
        site = int(match[2])
        if site in found:
            raise InvalidValue(f"{path}: line {number} lists site-{site} again")
        if _bytes(key) in map(_bytes, found.values()):
            raise InvalidValue(f"{path}: line {number} gives site-{site} the key of another site")
        found[site] = key
    if not found:
        raise InvalidValue(f"{path} lists no public key")
    return found


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read ({error.strerror or error})") from None


def _bytes(key: PublicIdentity) -> bytes:
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
