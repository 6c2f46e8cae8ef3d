"""A second reader of exchanges after docs/secure.md, without `fedloom.secure`."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

Record = dict[str, Any]


def split(data: bytes) -> list[bytes]:
    """Return the fields of a packed text."""
    fields = []
    while data:
        (length,) = struct.unpack_from(">Q", data)
        fields.append(data[8 : 8 + length])
        assert len(fields[-1]) == length
        data = data[8 + length :]
    return fields


def join(*fields: bytes) -> bytes:
    return b"".join(struct.pack(">Q", len(field)) + field for field in fields)


def numbers(data: bytes) -> list[int]:
    return list(struct.unpack(f">{len(data) // 8}Q", data))


# --- HPKE in base mode: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20Poly1305 (RFC 9180,
# sections 4 and 5) ---


def _hmac(key: bytes, content: bytes) -> bytes:
    mac = hmac.HMAC(key, hashes.SHA256())
    mac.update(content)
    return mac.finalize()


def _extract(suite: bytes, salt: bytes, label: bytes, content: bytes) -> bytes:
    return _hmac(salt or bytes(32), b"HPKE-v1" + suite + label + content)


def _expand(suite: bytes, secret: bytes, label: bytes, info: bytes, length: int) -> bytes:
    return _hmac(secret, struct.pack(">H", length) + b"HPKE-v1" + suite + label + info + b"\x01")[
        :length
    ]


def opened(envelope: bytes, private: X25519PrivateKey, info: bytes) -> bytes:
    """Decrypt an envelope: 32 bytes of the sender's fresh key, then the ciphertext."""
    fresh, sealed = envelope[:32], envelope[32:]
    shared = private.exchange(X25519PublicKey.from_public_bytes(fresh))
    kem, suite = b"KEM" + struct.pack(">H", 0x20), b"HPKE" + struct.pack(">HHH", 0x20, 1, 3)
    context = fresh + private.public_key().public_bytes_raw()
    secret = _expand(kem, _extract(kem, b"", b"eae_prk", shared), b"shared_secret", context, 32)
    schedule = (
        b"\x00"
        + _extract(suite, b"", b"psk_id_hash", b"")
        + _extract(suite, b"", b"info_hash", info)
    )
    base = _extract(suite, secret, b"secret", b"")
    key, nonce = (
        _expand(suite, base, b"key", schedule, 32),
        _expand(suite, base, b"base_nonce", schedule, 12),
    )
    return ChaCha20Poly1305(key).decrypt(nonce, sealed, b"")


# --- the exchange ---


@dataclass
class Reader:
    """Follows one attempt of an exchange from its bytes and checks every field.

    It has all private keys.
    """

    sealing: dict[int, X25519PrivateKey]
    server: X25519PrivateKey
    identities: dict[int, Ed25519PublicKey]
    verifying: dict[int, Ed25519PublicKey] = field(default_factory=dict)
    bodies: dict[int, bytes] = field(default_factory=dict)
    # repeat, kind, sender, recipient, index
    sent: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def begin(self, request: bytes) -> Record:
        """Return the terms in a request to begin."""
        kind, self.terms = split(request)
        assert kind == b"begin"
        label, run, when, key, counts, peers, sizes = split(self.terms)
        assert label == b"fedloom terms"
        assert key == self.server.public_key().public_bytes_raw()
        self.run, self.when, self.peers, self.sizes = (
            run,
            when.decode(),
            numbers(peers),
            numbers(sizes),
        )
        round, attempt, self.repeats, low, high = numbers(counts)
        return {"run": run.decode(), "when": self.when, "round": round, "attempt": attempt, "repeats": self.repeats,
                "low": low, "high": high, "peers": self.peers, "sizes": self.sizes}  # fmt: skip

    def letters(self, message: bytes) -> list[tuple[int, int, bytes]]:
        """Return sender, recipient and body of the letters in a request or an answer."""
        kind, *packed = split(message)
        assert kind == b"letters"
        return [(*struct.unpack_from(">II", letter), letter[8:]) for letter in packed]

    def introduce(self, sender: int, body: bytes) -> None:
        verifying, sealing, signature = split(body)
        assert sealing == self.sealing[sender].public_key().public_bytes_raw()
        content = join(
            b"fedloom introduction", self.run, struct.pack(">Q", sender), verifying, sealing
        )
        self.identities[sender].verify(signature, content)
        self.verifying[sender], self.bodies[sender] = (
            Ed25519PublicKey.from_public_bytes(verifying),
            body,
        )

    @property
    def session(self) -> bytes:
        bodies = [self.bodies[peer] for peer in sorted(self.bodies)]
        return hashlib.sha256(join(b"fedloom session", self.terms, *bodies)).digest()

    def note(self, sender: int, recipient: int, body: bytes) -> tuple[int, int, int, bytes]:
        """Return repeat, kind, number and the layer with its index (or nothing) of a letter.

        Letters after the introductions have this format.
        """
        self.verifying[sender].verify(body[-64:], body[:-64])
        magic, session, repeat, kind, from_peer, to_peer, number = struct.unpack_from(
            ">4s32sIBIII", body
        )
        assert (magic, session, from_peer, to_peer) == (b"flsx", self.session, sender, recipient)
        header, payload = body[:53], body[53:-64]
        if kind in (1, 4):
            assert payload == b""
            return repeat, kind, number, b""
        sizes = [size + 48 * (self.when == "before_upload") for size in self.sizes]
        assert len(payload) == 32 + 8 + 4 + max(sizes) + 16
        padded = opened(payload, self.sealing[recipient], header)
        (length,) = struct.unpack_from(">Q", padded)
        content = padded[8 : 8 + length]
        assert set(padded[8 + length :]) <= {0}
        (index,) = struct.unpack_from(">I", content)
        assert len(content) - 4 == sizes[index]
        self.sent.append((repeat, kind, sender, recipient, index))
        return repeat, kind, number, content

    def layer(self, index: int, envelope: bytes) -> bytes:
        """Return the layer in an envelope for the server."""
        info = join(b"fedloom layer", hashlib.sha256(self.terms).digest(), struct.pack(">Q", index))
        return opened(envelope, self.server, info)
