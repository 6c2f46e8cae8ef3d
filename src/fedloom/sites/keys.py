"""Keys of a federation over real sites: an authority, a server certificate, a key pair per site.

Each folder is for one place (docs/real-sites.md). All keys are on the curve P-384, the widest that
Flower accepts for SuperNodes.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedloom.common.errors import DataError, InvalidValue
from fedloom.common.fields import require_at_least, require_between
from fedloom.secure.envelopes import PrivateIdentity
from fedloom.sites.node_config import read_content, read_private
from fedloom.state.files import make_folder, remove_unfinished, write_bytes

AUTHORITY_DAYS = 3650
"""Days for which the authority's certificate is valid: ten years."""

SERVER_DAYS = 825
"""Days for which a server's certificate is valid by default; common systems accept no more."""

HOME = ("localhost", "127.0.0.1")
"""Host names in every server certificate."""

_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip

_SKEW = timedelta(hours=1)  # the clocks of sites differ

_HOST = re.compile(
    r"(?=.{1,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*",
    re.I,
)


@dataclass(frozen=True)
class Keys:
    """Paths of a federation's keys.

    Attributes:
        folder: Folder of all keys.
        sites: Number of sites.
        written: Files that this call of `make_keys` has written.
    """

    folder: Path
    sites: int
    written: list[Path] = field(default_factory=list)

    @property
    def authority_key(self) -> Path:
        return self.folder / "authority" / "ca.key"

    @property
    def server(self) -> Path:
        """Folder for the server: `ca.crt`, `server.crt`, `server.key` and all public keys."""
        return self.folder / "server"

    def public(self, site: int) -> Path:
        """Return the path of a site's public key, for its registration."""
        return self.server / f"site-{site}.pub"

    def site(self, site: int) -> Path:
        """Return the folder for a site: `ca.crt`, `site.key` and `peers.pub`."""
        return self.folder / f"site-{site}"

    def write(self, path: Path, content: bytes) -> None:
        """Write a file, complete or not at all; only its owner can read a private key.

        Args:
            path: The file. The ending `.key` marks a private key.
            content: All bytes of the file.
        """
        make_folder(path.parent, mode=0o700)
        remove_unfinished(path.parent)
        write_bytes(path, content, mode=0o600 if path.suffix == ".key" else 0o644)
        self.written.append(path)


def make_keys(folder: Path, sites: int, hosts: Sequence[str] = (), days: int = SERVER_DAYS) -> Keys:
    """Make the missing keys of a federation in a folder.

    To add sites, call this again with more sites: the lists of public keys are extended. To renew
    the server's certificate, remove `server/server.crt` first.

    Args:
        folder: Folder of all keys.
        sites: Number of sites.
        hosts: Names or addresses of the server besides `localhost` and `127.0.0.1`.
        days: Days for which a new certificate of the server is valid.

    Returns:
        The paths of the keys, and the written files.

    Raises:
        InvalidValue: A host is not valid, there are too few sites or days, or an existing
            certificate lacks a host.
        DataError: A file cannot be read or written, or the authority's key is missing.
    """
    require_at_least("sites", sites, 1)
    require_between("days", days, 1, AUTHORITY_DAYS)
    names = require_hosts(hosts)
    keys = Keys(folder, sites)
    usages = ("key_cert_sign", "crl_sign")
    authority = keys.server / "ca.crt"
    if authority.exists():
        _read_certificate(authority)
    else:
        key = _key(keys, keys.authority_key)
        keys.write(authority, _certificate("authority", key, key, AUTHORITY_DAYS, usages))
    _server(keys, names, days)
    for site in range(sites):
        _site(keys, site, read_content(authority))
    numbers = sorted(
        int(path.stem.removeprefix("site-")) for path in keys.server.glob("site-*.pub")
    )
    listed = b"".join(read_content(keys.public(number)) for number in numbers)
    for number in numbers:
        path = keys.site(number) / "peers.pub"
        if (keys.site(number) / "site.key").exists() and not (
            path.exists() and read_content(path) == listed
        ):
            keys.write(path, listed)
    return keys


def require_hosts(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return these hosts and `HOME` in the form for a certificate.

    Raises:
        InvalidValue: A host is not a name or an address.
    """
    return [_general_name(host) for host in dict.fromkeys((*HOME, *hosts))]


def _key(keys: Keys, path: Path, style: PrivateFormat = PrivateFormat.PKCS8) -> PrivateIdentity:
    """Return the private key in a file; make the file if it does not exist."""
    if path.exists():
        return read_private(path)
    key = ec.generate_private_key(ec.SECP384R1())
    keys.write(path, key.private_bytes(Encoding.PEM, style, NoEncryption()))
    return key


def _server(keys: Keys, names: list[x509.GeneralName], days: int) -> None:
    """Make the server's certificate. Renewing it does not change the private key."""
    path = keys.server / "server.crt"
    key_path = keys.server / "server.key"
    if path.exists() and key_path.exists():
        certificate = _read_certificate(path)
        today = datetime.now(UTC)
        if certificate.not_valid_after_utc < today:
            raise InvalidValue(
                f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}: remove it to "
                "have a new one"
            )
        alternatives = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
        if lacking := [str(name.value) for name in names if name not in alternatives]:
            raise InvalidValue(
                f"{path} does not contain {lacking[0]!r}: remove it to have a new one for all hosts"
            )
        return
    if not keys.authority_key.exists():
        raise DataError(
            f"{path} cannot be signed: put {keys.authority_key} back, or make all keys in "
            "another folder"
        )
    purposes = [
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.SubjectAlternativeName(names),
    ]
    signer = _key(keys, keys.authority_key)
    keys.write(
        path,
        _certificate(
            "server", _key(keys, key_path), signer, days, ("digital_signature",), purposes
        ),
    )


def _site(keys: Keys, site: int, authority: bytes) -> None:
    """Make a site's key pair.

    If only the public key exists, the site's folder was handed over, so no key is made.
    """
    path = keys.site(site) / "site.key"
    public_path = keys.public(site)
    if not path.exists() and public_path.exists():
        return
    key = _key(keys, path, PrivateFormat.OpenSSH)
    if not public_path.exists():
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        keys.write(public_path, public + f" site-{site}\n".encode())
    if not (keys.site(site) / "ca.crt").exists():
        keys.write(keys.site(site) / "ca.crt", authority)


def _certificate(
    holder: str,
    key: PrivateIdentity,
    signer: PrivateIdentity,
    days: int,
    usages: Sequence[str],
    purposes: Sequence[x509.ExtensionType] = (),
) -> bytes:
    """Return a certificate in PEM, signed by the authority with the key `signer`."""
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedloom federation {who}")])
        for who in (holder, "authority")
    )
    issued = datetime.now(UTC)
    is_authority = holder == "authority"
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(issued - _SKEW)
        .not_valid_after(issued + timedelta(days=days))
        .add_extension(
            x509.BasicConstraints(is_authority, path_length=0 if is_authority else None),
            critical=True,
        )
        .add_extension(
            x509.KeyUsage(**{usage: usage in usages for usage in _USAGES}), critical=True
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    for purpose in purposes:
        builder = builder.add_extension(purpose, critical=False)
    algorithm = None if isinstance(signer, Ed25519PrivateKey) else hashes.SHA384()
    return builder.sign(signer, algorithm).public_bytes(Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    """Return an address or host name in the form for a certificate."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    # Four numbers that are not an address would be a host name that no client requests.
    if not _HOST.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
        raise InvalidValue(
            f"host {host!r} must be a name such as fl.example.org or an address such as 10.0.0.5"
        )
    return x509.DNSName(host.lower())


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read_content(path))
    except ValueError:
        raise DataError(f"{path} is not a certificate in PEM") from None
