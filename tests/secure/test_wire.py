"""Messages of an exchange have the bytes that docs/secure.md describes.

The tests read recorded messages in `vectors/` and new ones. If the description changes,
`PYTHONPATH=tests/support python tests/secure/test_wire.py` records a new exchange.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedloom.secure import (
    SERVER,
    InMemoryTransport,
    Peer,
    ProtocolViolation,
    Rules,
    ServerKey,
    Terms,
    run_exchange,
)
from fedloom.secure.envelopes import is_signed, unseal
from fedloom.secure.wire import INDEX, Introduction, PeerMessage, PeerSession, pack, read_note
from secure_reader import Reader

PATH = Path(__file__).parent / "vectors" / "secure_exchange.json"

SIZES = (5, 3)


class Recording(InMemoryTransport):
    """Records every step's requests and answers."""

    steps: list[list[dict[str, Any]]]

    def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
        answers = super().carry(requests)
        self.steps.append(
            [
                {"peer": k, "request": requests[k].hex(), "answer": answers[k].hex()}
                for k in sorted(requests)
            ]
        )
        return answers


def recorded(when: str) -> dict[str, Any]:
    """Run an exchange of three peers; return its messages and all keys as hexadecimal text."""
    key, rules = ServerKey(), Rules(2, 1, 2)
    identities = {k: Ed25519PrivateKey.generate() for k in (3, 7, 11)}
    public_keys = {k: identity.public_key() for k, identity in identities.items()}
    peers = {k: Peer(k, identities[k], public_keys, rules) for k in identities}
    models = {k: [bytes([k] * size) for size in SIZES] for k in peers}
    for k, peer in peers.items():
        peer.offer(models[k])
    transport = Recording(peers)
    transport.steps = []
    terms = Terms("vectors", 4, when, 0, tuple(peers), key.public, rules, SIZES)
    run_exchange(transport, terms)
    uploads = {
        k: peer.upload() if when == "before_upload" else peer.layers for k, peer in peers.items()
    }
    return {
        "when": when,
        "server_key": key.private.private_bytes_raw().hex(),
        "identities": {
            str(k): identity.private_bytes_raw().hex() for k, identity in identities.items()
        },
        "signing": {str(k): peer.signing.private_bytes_raw().hex() for k, peer in peers.items()},
        "sealing": {str(k): peer.opening.private_bytes_raw().hex() for k, peer in peers.items()},
        "models": {str(k): [layer.hex() for layer in model] for k, model in models.items()},
        "terms": terms.encode().hex(),
        "session": peers[3].session.digest.hex(),
        "steps": transport.steps,
        "held": {str(k): [layer.hex() for layer in layers] for k, layers in uploads.items()},
    }


def require_exchange_as_documented(case: dict[str, Any]) -> None:
    """Read a recorded exchange with only the rules of docs/secure.md; check each layer's move."""
    server = X25519PrivateKey.from_private_bytes(bytes.fromhex(case["server_key"]))
    identities = {
        int(k): Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))
        for k, text in case["identities"].items()
    }
    sealing = {
        int(k): X25519PrivateKey.from_private_bytes(bytes.fromhex(text))
        for k, text in case["sealing"].items()
    }
    reader = Reader(
        sealing, server, {k: identity.public_key() for k, identity in identities.items()}
    )
    introductions, *steps = case["steps"]
    for entry in introductions:
        terms = reader.begin(bytes.fromhex(entry["request"]))
        assert terms == {"run": "vectors", "when": case["when"], "round": 4, "attempt": 0, "repeats": 2, "low": 1, "high": 2,
                         "peers": [3, 7, 11], "sizes": list(SIZES)}  # fmt: skip
        letters = reader.letters(bytes.fromhex(entry["answer"]))
        assert [recipient for _, recipient, _ in letters] == [
            k for k in (3, 7, 11) if k != entry["peer"]
        ]
        for sender, _, body in letters:
            reader.introduce(sender, body)
    assert reader.session.hex() == case["session"]
    assert len(steps) == 2 * reader.repeats + 2
    kinds: list[set[tuple[int, int]]] = []
    delivered = introductions
    for step in steps:
        going = [
            letter
            for entry in delivered
            for letter in reader.letters(bytes.fromhex(entry["answer"]))
        ]
        coming = [
            letter for entry in step for letter in reader.letters(bytes.fromhex(entry["request"]))
        ]
        assert sorted(going) == sorted(coming), "the server changed what it carried"
        notes = [
            (sender, recipient, *reader.note(sender, recipient, body))
            for entry in step
            for sender, recipient, body in reader.letters(bytes.fromhex(entry["answer"]))
        ]
        kinds.append({(repeat, kind) for _, _, repeat, kind, _, _ in notes})
        for sender in (3, 7, 11):
            for recipient in {3, 7, 11} - {sender}:
                mine = [note for note in notes if note[:2] == (sender, recipient)]
                parcels = [number for _, _, _, kind, number, _ in mine if kind in (2, 3)]
                assert sorted(parcels) == list(range(len(parcels)))
                announced = [number for _, _, _, kind, number, _ in mine if kind == 1]
                assert announced in ([], [len(parcels)])
        delivered = step
    assert kinds == [{(1, 1), (1, 2)}, {(1, 3)}, {(2, 1), (2, 2)}, {(2, 3)}, {(2, 4)}, set()]
    outgoing = Counter((r, s, t, i) for r, kind, s, t, i in reader.sent if kind == 2)
    back = Counter((r, t, s, i) for r, kind, s, t, i in reader.sent if kind == 3)
    assert outgoing == back, "for every layer one of the same index comes back"
    layers_held = {
        int(k): [bytes.fromhex(layer) for layer in layers] for k, layers in case["held"].items()
    }
    if case["when"] == "before_upload":
        layers_held = {
            k: [reader.layer(index, layer) for index, layer in enumerate(layers)]
            for k, layers in layers_held.items()
        }
    models = {
        int(k): [bytes.fromhex(layer) for layer in layers] for k, layers in case["models"].items()
    }
    for index in range(len(SIZES)):
        assert sorted(layers[index] for layers in layers_held.values()) == sorted(
            layers[index] for layers in models.values()
        )


@pytest.mark.parametrize("index", [0, 1])
def test_a_reader_of_the_page_follows_the_recorded_exchange(index: int) -> None:
    require_exchange_as_documented(json.loads(PATH.read_text())[index])


@pytest.mark.parametrize("when", ["before_upload", "before_train"])
def test_a_reader_of_the_page_follows_a_new_exchange(when: str) -> None:
    require_exchange_as_documented(recorded(when))


@pytest.mark.parametrize("index", [0, 1])
def test_the_library_writes_and_reads_the_recorded_bytes(index: int) -> None:
    case = json.loads(PATH.read_text())[index]
    server = ServerKey(X25519PrivateKey.from_private_bytes(bytes.fromhex(case["server_key"])))
    terms = Terms("vectors", 4, case["when"], 0, (3, 7, 11), server.public, Rules(2, 1, 2), SIZES)
    assert terms.encode().hex() == case["terms"]
    assert Terms.decode(bytes.fromhex(case["terms"])) == terms
    introductions: dict[int, Introduction] = {}
    for entry in case["steps"][0]:
        peer = entry["peer"]
        assert PeerMessage("begin", terms).encode().hex() == entry["request"]
        answer = PeerMessage.decode(bytes.fromhex(entry["answer"]), peer)
        assert answer.encode().hex() == entry["answer"]
        introductions[peer] = keys = Introduction.decode(answer.letters[0].body, peer)
        identity = Ed25519PrivateKey.from_private_bytes(
            bytes.fromhex(case["identities"][str(peer)])
        )
        signing = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(case["signing"][str(peer)]))
        assert keys.signature == identity.sign(keys.signed_content("vectors", peer))
        assert is_signed(
            keys.signed_content("vectors", peer), keys.signature, identity.public_key()
        )
        assert keys.verifying == signing.public_key().public_bytes_raw()
    assert PeerSession(terms, introductions).digest.hex() == case["session"]
    for step in case["steps"][1:]:
        for entry in step:
            request = PeerMessage.decode(bytes.fromhex(entry["request"]))
            assert request.encode().hex() == entry["request"]
            for letter in PeerMessage.decode(bytes.fromhex(entry["answer"]), entry["peer"]).letters:
                note = read_note(letter.body, letter.sender)
                signing = Ed25519PrivateKey.from_private_bytes(
                    bytes.fromhex(case["signing"][str(letter.sender)])
                )
                assert note.signed(signing) == letter.body
                if note.payload:
                    assert len(letter.body) == terms.parcel_size()
                    opening = X25519PrivateKey.from_private_bytes(
                        bytes.fromhex(case["sealing"][str(letter.recipient)])
                    )
                    padded = unseal(note.payload, opening, note.header()) or b""
                    content = padded[8 : 8 + int.from_bytes(padded[:8])]
                    assert (
                        len(content) == INDEX + terms.held_sizes()[int.from_bytes(content[:INDEX])]
                    )
    if case["when"] == "before_upload":
        uploads = {
            int(k): [bytes.fromhex(layer) for layer in layers] for k, layers in case["held"].items()
        }
        models, faults = server.open_models(uploads, terms)
        assert faults == []
        assert sorted(layers[0] or b"" for layers in models.values()) == [
            bytes([k] * 5) for k in (3, 7, 11)
        ]


def test_a_fault_is_written_as_on_the_page() -> None:
    answer = PeerMessage("fault", fault=ProtocolViolation("invalid", SERVER, "no server key"))
    assert answer.encode() == pack(b"fault", b"invalid", b"\xff" * 8, b"no server key")
    assert PeerMessage("abort").encode() == pack(b"abort")


if __name__ == "__main__":
    PATH.write_text(
        json.dumps([recorded(when) for when in ("before_upload", "before_train")], indent=1) + "\n"
    )
