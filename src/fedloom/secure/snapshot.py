"""A peer between two requests as bytes, for a site whose process ends after each: keep them where only the site can read.

They hold the keys of the run and the model that was offered. Reading them never runs code.
"""

from __future__ import annotations

import json

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.secure.exchange import LayerBuffers
from fedloom.secure.peer import Peer
from fedloom.secure.wire import Terms, pack, unpack


def snapshot(peer: Peer) -> bytes:
    """Return all that the peer must remember to go on with the next request; empty before its first exchange."""
    if peer.run is None:
        return b""
    met = sorted(peer.verifying) if peer.step not in (None, "introductions") else []
    head = {
        "run": peer.run,
        "step": peer.step,
        "repeat": peer.repeat,
        "committed": peer.committed,
        "met": met,
        "buffers": [len(buffer) for buffer in peer.holding.buffers],
        "sent": peer.holding.sent,
    }
    keys = [key for k in met for key in (peer.verifying[k].public_bytes_raw(), peer.sealing[k])]
    return pack(
        json.dumps(head).encode(),
        pack(peer.signing.private_bytes_raw(), peer.opening.private_bytes_raw(), peer.introduction, peer.server_key),
        pack(*sorted(peer.past)),
        pack(*sorted(peer.uploaded)),
        pack(peer.terms.encode(), peer.session if met else b""),
        pack(*keys),
        pack(*peer.offered),
        pack(*(item for buffer in peer.holding.buffers for item in buffer)),
    )


def restore(peer: Peer, data: bytes) -> None:
    """Make a new peer of the same number and identities go on where `snapshot` was taken, by the rules that it had then."""
    if not data:
        return
    text, *blobs = unpack(data, peer.number)
    head = json.loads(text)
    secret, past, uploaded, agreed, keys, offered, items = (unpack(blob, peer.number) for blob in blobs)
    peer.run, peer.step, peer.repeat, peer.committed = (head[key] for key in ("run", "step", "repeat", "committed"))
    peer.signing = Ed25519PrivateKey.from_private_bytes(secret[0])
    peer.opening = X25519PrivateKey.from_private_bytes(secret[1])
    peer.introduction, peer.server_key, peer.past = secret[2], secret[3], set(past)
    peer.uploaded |= set(uploaded)
    peer.terms, peer.session = Terms.decode(agreed[0]), agreed[1]
    peer.rules = peer.terms.rules
    peer.others = [k for k in peer.terms.peers if k != peer.number]
    met = head["met"]
    peer.verifying = {k: Ed25519PublicKey.from_public_bytes(key) for k, key in zip(met, keys[::2], strict=True)}
    peer.sealing = dict(zip(met, keys[1::2], strict=True))
    peer.offered = offered
    remaining = iter(items)
    peer.holding = LayerBuffers(peer.number, peer.terms.peers, [])
    peer.holding.buffers = [[next(remaining) for _ in range(length)] for length in head["buffers"]]
    peer.holding.sent = [(recipient, index) for recipient, index in head["sent"]]
