"""Sealing, signing and padding with `cryptography`.

HPKE (RFC 9180) seals. Ed25519 signs, or ECDSA for identities on NIST curves. HPKE draws a fresh
X25519 key pair for every envelope: no key has two nonces, and the same content is sealed to
different bytes each time.
"""

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

PrivateIdentity = Ed25519PrivateKey | ec.EllipticCurvePrivateKey
"""A peer's long-term key: Ed25519, or on a NIST curve as SuperNodes have."""

PublicIdentity = Ed25519PublicKey | ec.EllipticCurvePublicKey

OVERHEAD = 48
"""Bytes that sealing adds: the sender's fresh public key (32) and the tag (16)."""

SIGNATURE = 64
"""Bytes of an Ed25519 signature."""

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


def seal(content: bytes, key: bytes, context: bytes) -> bytes:
    """Seal a content for the owner of a key.

    Args:
        content: The content.
        key: X25519 public key, 32 bytes.
        context: Bytes that `unseal` must repeat.

    Returns:
        The envelope, `OVERHEAD` bytes longer than the content. It differs for each call.
    """
    return _SUITE.encrypt(content, X25519PublicKey.from_public_bytes(key), context)


def unseal(envelope: bytes, key: X25519PrivateKey, context: bytes) -> bytes | None:
    """Open an envelope.

    Args:
        envelope: The sealed content.
        key: X25519 private key.
        context: The context of `seal`.

    Returns:
        The content, or None if key, context or envelope do not match.
    """
    try:
        return _SUITE.decrypt(envelope, key, context)
    except (InvalidTag, ValueError):
        return None


def can_seal(key: bytes) -> bool:
    """Return True unless this X25519 public key is a point of low order.

    With such a point, every shared secret is zero.
    """
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return False
    return True


def sign(content: bytes, identity: PrivateIdentity) -> bytes:
    """Sign with a long-term identity.

    Args:
        content: The bytes to sign.
        identity: The private key: Ed25519, or on a NIST curve, then with SHA-384.

    Returns:
        The signature: `SIGNATURE` bytes of Ed25519, or DER of variable length.
    """
    if isinstance(identity, Ed25519PrivateKey):
        return identity.sign(content)
    return identity.sign(content, ec.ECDSA(hashes.SHA384()))


def is_signed(content: bytes, signature: bytes, identity: PublicIdentity) -> bool:
    """Return True if the signature was made by this identity.

    Args:
        content: The bytes that should be signed.
        signature: Bytes of the signature; any bytes are accepted, and wrong ones give False.
        identity: The public key, of the same kind as in `sign`.

    Returns:
        False also for a damaged signature.
    """
    try:
        if isinstance(identity, Ed25519PublicKey):
            identity.verify(signature, content)
        else:
            identity.verify(signature, content, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True
