"""Faults of an exchange are noticed, named and lose no layer.

A lying peer costs the others only time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.common.errors import InvalidValue
from fedloom.secure import (
    SERVER,
    ExchangeAborted,
    InMemoryTransport,
    Peer,
    ProtocolViolation,
    Rules,
    ServerKey,
    Terms,
    run_exchange,
)
from fedloom.secure.faults import KINDS
from fedloom.secure.wire import (
    ANNOUNCEMENT,
    RETURNED,
    SENT,
    Introduction,
    Letter,
    PeerMessage,
    pack,
    read_note,
)
from secure_support import KEY, WatchedTransport, World, flipped, is_parcel

# --- faults on the way to a peer ---


Change = Callable[[tuple[Letter, ...], list[Letter]], tuple[Letter, ...]]
"""(letters of one message, all letters of earlier steps) -> the letters to deliver."""


def first_of_kind(letters: Sequence[Letter], kind: int) -> int:
    """Return the index of the first parcel of this kind."""
    return next(
        k for k, letter in enumerate(letters) if read_note(letter.body, letter.sender).kind == kind
    )


def on(kind: int, change: Callable[[Letter], tuple[Letter, ...]]) -> Change:
    """Replace the first letter of a kind."""

    def apply(letters: tuple[Letter, ...], earlier: list[Letter]) -> tuple[Letter, ...]:
        index = first_of_kind(letters, kind)
        return letters[:index] + change(letters[index]) + letters[index + 1 :]

    return apply


ON_THE_WAY: dict[str, tuple[int, str, Change]] = {
    "a lost parcel": (2, "missing", on(SENT, lambda _: ())),
    "a lost announcement": (2, "missing", on(ANNOUNCEMENT, lambda _: ())),
    "a lost return": (3, "missing", on(RETURNED, lambda _: ())),
    "a parcel twice": (2, "duplicated", on(SENT, lambda e: (e, e))),
    "a return twice": (3, "duplicated", on(RETURNED, lambda e: (e, e))),
    "an announcement twice": (2, "duplicated", on(ANNOUNCEMENT, lambda e: (e, e))),
    "an altered envelope": (
        2,
        "altered",
        on(SENT, lambda e: (e._replace(body=flipped(e.body, 100)),)),
    ),
    "an altered header": (
        2,
        "altered",
        on(SENT, lambda e: (e._replace(body=flipped(e.body, 50)),)),
    ),
    "an altered signature": (
        3,
        "altered",
        on(RETURNED, lambda e: (e._replace(body=flipped(e.body, -1)),)),
    ),
    "an altered number": (
        2,
        "altered",
        on(ANNOUNCEMENT, lambda e: (e._replace(body=flipped(e.body, 52)),)),
    ),
    "a cut parcel": (2, "altered", on(SENT, lambda e: (e._replace(body=e.body[:-1]),))),
    "no letter at all": (2, "damaged", on(SENT, lambda e: (e._replace(body=b"hello"),))),
    "an earlier stage again": (
        3,
        "replayed",
        lambda letters, earlier: (*letters, next(e for e in earlier if is_parcel(e))),
    ),
    "an introduction altered": (
        1,
        "impostor",
        lambda e, _: (e[0]._replace(body=flipped(e[0].body, 20)), *e[1:]),
    ),
    "an introduction lost": (1, "missing", lambda e, _: e[1:]),
    "an introduction twice": (1, "duplicated", lambda e, _: (*e, e[0])),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
@pytest.mark.parametrize("when", ["before_upload", "before_train"])
def test_faults_on_the_way_are_noticed_and_lose_no_layer(name: str, when: str) -> None:
    """The server saw a correct message of the sender, so it excludes the recipient."""
    step_of, kind, change = ON_THE_WAY[name]
    delivered: list[Letter] = []
    named: list[int] = []

    def tamper(step: int, recipient: int, letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
        mine = letters
        if recipient == 12 and step == step_of:
            letters = change(letters, [e for e in delivered if e.recipient == 12])
            gone = [e for e in mine if e not in letters]
            twice = [e for e, n in Counter(letters).items() if n > 1]
            extra = [e for e in letters if e not in mine]
            named.append((gone or twice or extra)[0].sender)
        delivered.extend(mine)
        return letters

    world = World(5, rules=Rules(2, 3, 3), seed=1)
    transport = WatchedTransport(world.peers, tamper=tamper)
    terms, faults = world.exchange(transport, when)
    (fault,) = faults
    assert (fault.kind, fault.peer, fault.witness) == ("unproved", 12, None)
    assert f"peer {named[0]}: {KINDS[kind]}" in fault.detail
    assert terms.attempt == 1
    assert set(terms.peers) == set(world.numbers) - {12}
    assert world.outcome(terms) == world.expected(terms)
    assert world.peers[12].layers == world.models[12]
    # The same without a spare peer: the exchange has no effect.
    strict = World(5, rules=Rules(2, 3, 3), seed=1, fewest=5)
    delivered.clear()
    with pytest.raises(ExchangeAborted, match="exchange aborted with 4 of at least 5 peers left"):
        strict.exchange(WatchedTransport(strict.peers, tamper=tamper), when)
    assert {k: peer.layers for k, peer in strict.peers.items()} == strict.models
    assert not any(peer.committed for peer in strict.peers.values())


@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize("when", ["before_upload", "before_train"])
def test_a_peer_may_leave_at_any_step(step: int, when: str) -> None:
    world = World(4)
    terms, faults = world.exchange(WatchedTransport(world.peers, gone={11: step}), when)
    assert [(fault.kind, fault.peer) for fault in faults] == [("left", 11)]
    assert str(faults[0]) == "peer 11: stopped answering"
    assert terms.peers == (10, 12, 13)
    assert world.outcome(terms) == world.expected(terms)


def test_a_parcel_for_another_peer_or_of_another_exchange_is_refused() -> None:
    world = World(4, rules=Rules(2, 3, 3))
    earlier = WatchedTransport(world.peers)
    world.exchange(earlier, round=1)
    stale = next(e for e in earlier.letters if is_parcel(e) and e.recipient == 12)
    strayed = next(
        e for e in earlier.letters if is_parcel(e) and e.recipient == 11 and e.sender != 12
    )
    cases = (
        (stale, "replayed"),
        (strayed, "misdirected"),
        (strayed._replace(recipient=12), "misdirected"),
        (stale._replace(sender=12, recipient=12), "invalid"),
        (
            stale._replace(sender=next(k for k in world.numbers if k not in (12, stale.sender))),
            "altered",
        ),
    )
    for round, (extra, kind) in enumerate(cases, start=2):
        transport = WatchedTransport(
            world.peers,
            tamper=lambda step, to, e, extra=extra: (*e, extra) if (step, to) == (2, 12) else e,
        )
        terms, faults = world.exchange(transport, round=round)
        assert [(f.kind, f.peer) for f in faults] == [("unproved", 12)]
        assert f"peer {extra.sender}: {KINDS[kind]}" in faults[0].detail
        assert world.outcome(terms) == world.expected(terms)


# --- peers that break the rules ---


def sends(step_of: int, change: Change) -> type[Peer]:
    """Return a peer class with a changed answer to one step."""

    class Changed(Peer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.seen: list[Letter] = []
            self.request_index = -1

        def handle(self, request: bytes) -> bytes:
            answer = PeerMessage.decode(super().handle(request), self.number)
            self.request_index = (
                0 if PeerMessage.decode(request).kind == "begin" else self.request_index + 1
            )
            letters = (
                change(answer.letters, self.seen)
                if self.request_index == step_of
                else answer.letters
            )
            self.seen += answer.letters
            return replace(answer, letters=letters).encode()

    return Changed


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_letters_are_checked_before_they_are_carried(name: str) -> None:
    step_of, kind, change = ON_THE_WAY[name]
    kind = "invalid" if name.startswith("an introduction") else kind  # not the same for all
    world = World(5, rules=Rules(2, 3, 3), kinds={13: sends(step_of - 1, change)})
    terms, faults = world.exchange(InMemoryTransport(world.peers))
    assert [(fault.kind, fault.peer, fault.witness) for fault in faults] == [(kind, 13, None)]
    assert terms.peers == (10, 11, 12, 14)
    assert world.outcome(terms) == world.expected(terms)


class Overpromising(Peer):
    """Announces one layer more than it sends."""

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        return super()._letter(peer, kind, number + (kind == ANNOUNCEMENT and number < 2), content)


class Boundless(Peer):
    """Announces more layers than any model has."""

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        return super()._letter(peer, kind, 2**32 - 1 if kind == ANNOUNCEMENT else number, content)


class Stingy(Peer):
    """Sends more than it announces."""

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        return super()._letter(peer, kind, 0 if kind == ANNOUNCEMENT else number, content)


class Idle(Peer):
    """Sends fewer layers than agreed, so that its own model is mixed with no other model."""

    def _send(self) -> list[Letter]:
        super()._send()
        return [self._letter(peer, ANNOUNCEMENT, 0) for peer in self.others]


class Doubling(Peer):
    """Sends one layer twice to the same peer, as two layers."""

    def _send(self) -> list[Letter]:
        to = super()._send()[-1].recipient
        content = pack(bytes(4) + bytes(self.terms.held_sizes()[0])).ljust(
            self.terms.content_size(), b"\0"
        )
        announced = [self._letter(peer, ANNOUNCEMENT, 2 * (peer == to)) for peer in self.others]
        return announced + [self._letter(to, SENT, number, content) for number in range(2)]


class Confusing(Peer):
    """Returns layers of another index than it received."""

    def _parcels(self, going: Any, kind: int) -> list[Letter]:
        if kind == SENT:
            return super()._parcels(going, kind)
        return super()._parcels([s._replace(layer=(s.layer + 1) % 2) for s in going], kind)


class Garbling(Peer):
    """Signs parcels that no peer can open."""

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        letter = super()._letter(peer, kind, number, content)
        note = read_note(letter.body, self.number)
        spoilt = note._replace(payload=flipped(note.payload, -1)) if content is not None else note
        return letter._replace(body=spoilt.signed(self.signing))


class Shrinking(Peer):
    """Signs parcels of another size."""

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        return super()._letter(peer, kind, number, None if content is None else content[:-1])


class Posing(Peer):
    """Signs its keys with an unknown identity."""

    def _enter(self, terms: Terms) -> None:
        self.identity = Ed25519PrivateKey.generate()
        super()._enter(terms)


class Weak(Peer):
    """Introduces a signed key that makes every shared secret zero."""

    def _enter(self, terms: Terms) -> None:
        super()._enter(terms)
        keys = self.introduction._replace(sealing=bytes(32))
        signature = self.identity.sign(keys.signed_content(terms.run, self.number))  # type: ignore[call-arg, arg-type]
        self.introduction = keys._replace(signature=signature)


class Forging(Peer):
    """Writes in another peer's name."""

    def handle(self, request: bytes) -> bytes:
        answer = PeerMessage.decode(super().handle(request), self.number)
        return replace(
            answer, letters=tuple(e._replace(sender=10) for e in answer.letters)
        ).encode()


class Babbling(Peer):
    """Answers with bytes that are no answer."""

    def handle(self, request: bytes) -> bytes:
        super().handle(request)
        return b"\x00" * 7 + b"\x05hello"


class Nesting(Babbling):
    """Answers with lengths that make a careless reader loop for ever."""

    def handle(self, request: bytes) -> bytes:
        return pack(b"[" * 200_000)


class Empty(Babbling):
    """Answers with many empty parts."""

    def handle(self, request: bytes) -> bytes:
        return bytes(16 << 20)


@pytest.mark.parametrize(
    ("kind_of_peer", "fault"),
    [
        (Overpromising, "missing"),
        (Boundless, "missing"),
        (Stingy, "unannounced"),
        (Idle, "disagrees"),
        (Doubling, "spoilt"),
        (Confusing, "spoilt"),
        (Garbling, "spoilt"),
        (Shrinking, "invalid"),
        (Posing, "impostor"),
        (Weak, "invalid"),
        (Forging, "invalid"),
        (Babbling, "damaged"),
        (Nesting, "damaged"),
        (Empty, "damaged"),
    ],
)
def test_a_peer_that_breaks_the_exchange_is_named_and_left_out(
    kind_of_peer: type[Peer], fault: str
) -> None:
    # Two layers of one size: only the index distinguishes them.
    world = World(4, sizes=(40, 40), rules=Rules(1, 2, 2), kinds={13: kind_of_peer})
    world.offer()
    began = time.monotonic()
    terms, faults = run_exchange(InMemoryTransport(world.peers), world.terms())
    assert time.monotonic() - began < 5
    assert {(f.kind, f.peer) for f in faults} == {(fault, 13)}
    assert terms.peers == (10, 11, 12)
    exchanged = world.outcome(terms)
    for unit in range(2):
        assert sorted(m[unit] for m in exchanged.values()) == sorted(
            world.models[k][unit] for k in (10, 11, 12)
        )


@pytest.mark.parametrize("change", ["rules", "layers"])
def test_a_peer_with_other_rules_or_layers_is_left_out(change: str) -> None:
    world = World(4)
    world.offer()
    if change == "rules":
        world.peers[13].rules = Rules(2, 1, 1)
    else:
        world.peers[13].offer(world.models[13][:2] * 2)
    terms, faults = run_exchange(InMemoryTransport(world.peers), world.terms())
    ((kind, peer, detail),) = [(fault.kind, fault.peer, fault.detail) for fault in faults]
    assert (kind, peer) == ("withdrew", 13)
    assert "other rules or layers than here" in detail
    assert world.outcome(terms) == world.expected(terms)


# --- peers with false claims about others ---


def accusing(kind: str, accused: int, step_of: int, detail: str = "") -> type[Peer]:
    """Return a peer class that accuses another peer in every attempt."""

    class Accusing(Peer):
        request_index = -1

        def handle(self, request: bytes) -> bytes:
            answer = super().handle(request)
            self.request_index = (
                0 if PeerMessage.decode(request).kind == "begin" else self.request_index + 1
            )
            fault = ProtocolViolation(kind, accused, detail)
            return (
                PeerMessage("fault", fault=fault).encode()
                if self.request_index == step_of
                else answer
            )

    return Accusing


@pytest.mark.parametrize("step", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("accused", [SERVER, 10, 13, 99, -7])
@pytest.mark.parametrize(
    "kind", ["altered", "missing", "impostor", "left", "disagrees", "withdrew"]
)
def test_an_accuser_without_proof_is_left_out(kind: str, accused: int, step: int) -> None:
    world = World(4, kinds={13: accusing(kind, accused, step)})
    terms, faults = world.exchange(InMemoryTransport(world.peers))
    expected = "withdrew" if accused == SERVER else "unproved"
    assert [(fault.kind, fault.peer) for fault in faults] == [(expected, 13)]
    assert terms.peers == (10, 11, 12)
    assert world.outcome(terms) == world.expected(terms)


def test_an_accusation_that_nobody_can_check_is_believed_once() -> None:
    """A peer that rejects parcel after parcel leaves with the second peer that it accuses.

    Only senders of parcels can be accused.
    """

    class Complaining(Peer):
        """Claims that it cannot open the first parcel it receives."""

        def _open(self, parcels: Any) -> Any:
            if parcels:
                raise ProtocolViolation("spoilt", parcels[0].sender)
            return super()._open(parcels)

    world = World(6, rules=Rules(1, 3, 3), kinds={15: Complaining})
    terms, faults = world.exchange(InMemoryTransport(world.peers))
    assert [fault.kind for fault in faults] == ["spoilt", "spoilt", "unproved"]
    assert faults[-1].peer == 15
    assert len(terms.peers) == 3
    assert world.outcome(terms) == world.expected(terms)
    world = World(4, kinds={13: accusing("spoilt", 10, 0)})
    terms, faults = world.exchange(InMemoryTransport(world.peers))
    assert [(fault.kind, fault.peer) for fault in faults] == [("unproved", 13)]


def test_a_peer_that_accuses_one_who_is_gone_ends_nothing() -> None:
    world = World(5, kinds={12: accusing("missing", 11, 0), 13: accusing("missing", 12, 1)})
    terms, faults = world.exchange(WatchedTransport(world.peers, gone={11: 0}))
    assert [(fault.kind, fault.peer) for fault in faults] == [
        ("left", 11),
        ("unproved", 12),
        ("unproved", 13),
    ]
    assert terms.peers == (10, 14)
    assert terms.attempt == 2
    assert world.outcome(terms) == world.expected(terms)


def test_texts_of_peers_are_short_and_plain() -> None:
    text = "\x1b[31mred\x1b[0m\n" + 10_000_000 * "x"
    world = World(4, kinds={13: accusing("altered", 10, 0, text)})
    _, faults = world.exchange(InMemoryTransport(world.peers))
    (fault,) = faults
    assert len(str(fault)) < 500
    assert str(fault).isprintable()
    raw = pack(b"fault", b"altered", (10).to_bytes(8, signed=True), text.encode())
    decoded = PeerMessage.decode(raw, 13).fault
    assert decoded is not None
    assert str(decoded).isprintable()
    assert len(str(decoded)) < 500


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_bytes_raise_only_protocol_violations(data: st.DataObject) -> None:
    """Send a message with changed, cut or inserted bytes to a peer and to the server."""
    world = World(3)
    world.offer()
    peer = world.peers[10]
    request = PeerMessage("begin", world.terms()).encode()
    answer = peer.handle(request)
    messages = (
        request,
        answer,
        PeerMessage("letters", letters=PeerMessage.decode(answer, 10).letters).encode(),
        b"",
    )
    content = bytearray(data.draw(st.sampled_from(messages)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 12))] = data.draw(st.binary(max_size=12))
    assert isinstance(peer.handle(bytes(content)), bytes)
    with suppress(ProtocolViolation):
        PeerMessage.decode(bytes(content), 10)
    world = World(3)
    world.peers[12].handle = lambda request: bytes(content)  # type: ignore[method-assign]
    terms, _ = world.exchange(InMemoryTransport(world.peers))
    assert set(terms.peers) >= {10, 11}


# --- a hostile server ---


def test_another_server_key_for_one_peer_is_noticed() -> None:
    class TwoKeys(InMemoryTransport):
        """A server that gives one peer another key, to recognise that peer's layers."""

        def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
            decoded = {k: PeerMessage.decode(data) for k, data in requests.items()}
            if decoded[11].terms is not None:
                decoded[11] = PeerMessage("begin", replace(decoded[11].terms, server_key=key))
            return super().carry({k: request.encode() for k, request in decoded.items()})

    key = ServerKey().public
    world = World(4, fewest=4)
    transport = TwoKeys(world.peers)
    violations: list[ProtocolViolation] = []
    with pytest.raises(ExchangeAborted):
        world.exchange(transport)
    world.offer()
    # The honest server above refuses to carry the message signed by peer 11. A dishonest server
    # carries it, and the peers notice.
    begun = transport.carry(
        {k: PeerMessage("begin", world.terms(run="another")).encode() for k in world.numbers}
    )
    for _ in range(2):
        letters = [
            letter
            for k, answer in begun.items()
            for letter in PeerMessage.decode(answer, k).letters
        ]
        begun = transport.carry(
            {
                k: PeerMessage(
                    "letters", letters=tuple(e for e in letters if e.recipient == k)
                ).encode()
                for k in world.numbers
            }
        )
    for k, answer in begun.items():
        fault = PeerMessage.decode(answer, k).fault
        assert fault is not None
        violations.append(fault)
    assert {fault.kind for fault in violations} == {"disagrees"}
    assert {fault.peer for fault in violations} >= {11}
    assert {k: peer.layers for k, peer in world.peers.items()} == world.models


# Every X25519 public key of low order, as in RFC 7748's security considerations and in libsodium's
# list.
LOW_ORDER = [
    (0).to_bytes(32, "little"),
    (1).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    (2**255 - 18).to_bytes(32, "little"),
]


@pytest.mark.parametrize("key", LOW_ORDER)
def test_keys_with_which_nothing_is_secret_are_refused(key: bytes) -> None:
    world = World(3)
    world.offer()
    answer = PeerMessage.decode(
        world.peers[10].handle(PeerMessage("begin", world.terms(server_key=key)).encode()), 10
    )
    assert answer.fault is not None
    assert (answer.fault.peer, answer.fault.detail) == (SERVER, "no server key")
    with pytest.raises(ProtocolViolation, match=r"peer 11: .*a sealing key that is not valid"):
        Introduction.decode(Introduction(bytes(32), key, bytes(64)).encode(), 11)


def test_peers_refuse_forbidden_requests_of_the_server() -> None:
    world = World(3)
    world.peers[10].fewest = 3
    key = ServerKey().public
    for terms, kind, text in (
        (world.terms(peers=(10, 11)), "invalid", "2 of at least 3 peers"),
        (world.terms(peers=(10, 11, 99)), "invalid", "identity of peer 99"),
        (world.terms(peers=(11, 12)), "invalid", "list of peers"),
        (world.terms("before_lunch"), "invalid", "before_lunch"),
        (world.terms(server_key=b""), "invalid", "no server key"),
        (world.terms(rules=Rules(1)), "invalid", "other rules or layers"),
        (world.terms(sizes=(1, 2)), "invalid", "other rules or layers"),
        (world.terms(), None, ""),
        (world.terms(), "replayed", "terms that were used already"),
        (world.terms(round=2, server_key=key), "disagrees", "another key than before"),
    ):
        world.offer()
        answer = PeerMessage.decode(
            world.peers[10].handle(PeerMessage("begin", terms).encode()), 10
        )
        if kind is None:
            assert answer.fault is None
            continue
        assert answer.fault is not None
        assert (answer.fault.kind, answer.fault.peer) == (kind, SERVER)
        assert text in str(answer.fault)
        assert world.peers[10].layers == world.models[10]
    for request in (
        PeerMessage("letters").encode(),
        b"nonsense",
        b"",
        pack(b"[" * 200_000),
        bytes(16 << 20),
    ):
        began = time.monotonic()
        answer = PeerMessage.decode(world.peers[10].handle(request), 10)
        assert time.monotonic() - began < 2
        assert answer.fault is not None
        assert answer.fault.peer == SERVER
    world.peers[10].fewest = 9
    terms, faults = world.exchange(InMemoryTransport(world.peers), round=7)
    assert [(fault.kind, fault.peer) for fault in faults] == [("withdrew", 10)]
    assert "3 of at least 9 peers" in str(faults[0])
    assert terms.peers == (11, 12)


def test_a_peer_needs_two_others_by_default() -> None:
    identity = Ed25519PrivateKey.generate()
    assert Peer(1, identity, {1: identity.public_key()}, Rules()).fewest == 3


def test_a_model_is_uploaded_once() -> None:
    """A server with the uploads of four peers and of three of them could compute the fourth's."""
    world = World(4)
    terms, _ = world.exchange(InMemoryTransport(world.peers))
    uploads = {k: peer.upload() for k, peer in world.peers.items()}
    assert KEY.open_models(uploads, terms)[1] == []
    world.offer()
    second_terms = replace(world.terms(round=2), peers=(10, 11, 12))
    with pytest.raises(ExchangeAborted) as caught:
        run_exchange(InMemoryTransport(world.peers), second_terms)
    assert [(fault.kind, fault.peer) for fault in caught.value.faults] == [
        ("withdrew", k) for k in (10, 11, 12)
    ]
    assert all("this model was uploaded before" in fault.detail for fault in caught.value.faults)
    for peer in world.peers.values():
        with pytest.raises(InvalidValue, match="has not ended at this peer"):
            peer.upload()
    world.models = {k: [bytes(len(layer)) for layer in model] for k, model in world.models.items()}
    terms, faults = world.exchange(InMemoryTransport(world.peers), round=3)  # another model
    assert faults == []
    terms, faults = world.exchange(InMemoryTransport(world.peers), "before_train", round=3)
    assert faults == []
    with pytest.raises(InvalidValue, match="has not ended at this peer"):
        world.peers[10].upload()


def test_the_server_notices_copied_altered_and_missing_layers_and_uses_the_others() -> None:
    world = World(3)
    terms, _ = world.exchange(InMemoryTransport(world.peers))
    uploads = {k: peer.upload() for k, peer in world.peers.items()}
    good = KEY.open_models(uploads, terms)[0]
    copied = {**uploads, 11: [uploads[10][0], *uploads[11][1:]]}
    altered = {**uploads, 12: [*uploads[12][:2], flipped(uploads[12][2], 60)]}
    for spoilt, peer, layer, text in (
        (copied, 11, 0, "layer 0 of its upload was uploaded before"),
        (altered, 12, 2, "layer 2 of its upload cannot be opened"),
    ):
        models, faults = KEY.open_models(spoilt, terms)
        assert [(fault.kind, fault.peer, fault.detail) for fault in faults] == [
            ("spoilt", peer, text)
        ]
        assert models[peer][layer] is None
        models[peer][layer] = good[peer][layer]
        assert models == good
    for upload in (uploads[12][:2], [uploads[12][1], uploads[12][0], uploads[12][2]]):
        models, faults = KEY.open_models({**uploads, 12: upload}, terms)
        assert [(fault.kind, fault.peer) for fault in faults] == [("invalid", 12)]
        assert models == {k: good[k] for k in (10, 11)}
    world.peers[11].abort()  # the round is abandoned, even after the commitment
    assert world.peers[11].layers == world.models[11]


def test_bad_peers_are_refused() -> None:
    identity = Ed25519PrivateKey.generate()
    identities = {1: identity.public_key()}
    with pytest.raises(InvalidValue, match=r"the identities name peers \[1\], not peer 2 itself"):
        Peer(2, identity, identities, Rules())
    with pytest.raises(InvalidValue, match="fewest must be at least 1, not 0"):
        Peer(1, identity, identities, Rules(), fewest=0)
    peer = Peer(1, identity, identities, Rules(1, 3, 3))
    with pytest.raises(InvalidValue, match="low and high must be at most 2"):
        peer.offer([b"a", b"b"])
    with pytest.raises(InvalidValue, match="at least one byte"):
        peer.offer([b"a", b"", b"c"])
