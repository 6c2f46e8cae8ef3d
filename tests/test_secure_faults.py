"""Whatever goes wrong in an exchange is noticed, named, and costs no layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedloom.errors import InvalidValue
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
from fedloom.secure.envelopes import pad
from fedloom.secure.exchange import Sent
from fedloom.secure.wire import (
    ANNOUNCEMENT,
    RETURNED,
    SENT,
    Answer,
    Letter,
    Request,
    read_note,
)
from secure_support import KEY, World, flipped, is_parcel

# --- what goes wrong on the way ---


Change = Callable[[tuple[Letter, ...], list[Letter]], tuple[Letter, ...]]
"""(letters of peer 12's inbox, all letters of earlier steps) -> the letters to deliver."""


def first(letters: Sequence[Letter], kind: int) -> int:
    """Place of the first parcel of this kind."""
    return next(k for k, letter in enumerate(letters) if read_note(letter.body, letter.sender).kind == kind)


def on(kind: int, change: Callable[[Letter], tuple[Letter, ...]]) -> Change:
    """Replace the first letter of a kind."""

    def apply(letters: tuple[Letter, ...], earlier: list[Letter]) -> tuple[Letter, ...]:
        place = first(letters, kind)
        return letters[:place] + change(letters[place]) + letters[place + 1 :]

    return apply


ON_THE_WAY: dict[str, tuple[int, str, Change]] = {
    "a lost parcel": (2, "missing", on(SENT, lambda _: ())),
    "a lost announcement": (2, "missing", on(ANNOUNCEMENT, lambda _: ())),
    "a lost return": (3, "missing", on(RETURNED, lambda _: ())),
    "a parcel twice": (2, "duplicated", on(SENT, lambda e: (e, e))),
    "a return twice": (3, "duplicated", on(RETURNED, lambda e: (e, e))),
    "an announcement twice": (2, "duplicated", on(ANNOUNCEMENT, lambda e: (e, e))),
    "an altered envelope": (2, "altered", on(SENT, lambda e: (e._replace(body=flipped(e.body, 100)),))),
    "an altered header": (2, "altered", on(SENT, lambda e: (e._replace(body=flipped(e.body, 50)),))),
    "an altered signature": (3, "altered", on(RETURNED, lambda e: (e._replace(body=flipped(e.body, -1)),))),
    "an altered number": (2, "altered", on(ANNOUNCEMENT, lambda e: (e._replace(body=flipped(e.body, 52)),))),
    "a cut parcel": (2, "altered", on(SENT, lambda e: (e._replace(body=e.body[:-1]),))),
    "no letter at all": (2, "damaged", on(SENT, lambda e: (e._replace(body=b"hello"),))),
    "an earlier stage again": (3, "replayed", lambda letters, old: (*letters, next(e for e in old if is_parcel(e)))),
    "an introduction altered": (1, "impostor", lambda e, _: (e[0]._replace(body=flipped(e[0].body, 20)), *e[1:])),
    "an introduction lost": (1, "missing", lambda e, _: e[1:]),
    "an introduction twice": (1, "duplicated", lambda e, _: (*e, e[0])),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
@pytest.mark.parametrize("when", ["before_upload", "before_train"])
def test_whatever_happens_on_the_way_is_noticed_named_and_costs_no_layer(name: str, when: str) -> None:
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
    transport = InMemoryTransport(world.peers, tamper=tamper)
    terms, faults = world.exchange(transport, when)
    (fault,) = faults
    assert (fault.kind, fault.witness) == (kind, 12)
    assert named == [fault.peer]
    assert f"peer {fault.peer}" in str(fault)
    assert terms.attempt == 1
    assert set(terms.peers) == set(world.numbers) - {fault.peer}
    assert world.outcome(terms) == world.expected(terms)
    assert world.peers[fault.peer].layers == world.models[fault.peer]
    # The same with no peer to spare: nothing happened.
    strict = World(5, rules=Rules(2, 3, 3), seed=1, fewest=5)
    delivered.clear()
    with pytest.raises(ExchangeAborted, match="exchange aborted with 4 of at least 5 peers left") as caught:
        strict.exchange(InMemoryTransport(strict.peers, tamper=tamper), when)
    assert caught.value.faults[0].kind == kind
    assert {k: peer.layers for k, peer in strict.peers.items()} == strict.models
    assert not any(peer.committed for peer in strict.peers.values())


@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize("when", ["before_upload", "before_train"])
def test_a_peer_may_leave_at_any_step(step: int, when: str) -> None:
    world = World(4)
    terms, faults = world.exchange(InMemoryTransport(world.peers, gone={11: step}), when)
    assert [(fault.kind, fault.peer) for fault in faults] == [("left", 11)]
    assert str(faults[0]) == "peer 11: stopped answering"
    assert terms.peers == (10, 12, 13)
    assert world.outcome(terms) == world.expected(terms)


def test_a_parcel_for_another_peer_or_of_another_exchange_is_refused() -> None:
    world = World(4, rules=Rules(2, 3, 3))
    old = InMemoryTransport(world.peers)
    world.exchange(old, round=1)
    stale = next(e for e in old.letters if is_parcel(e) and e.recipient == 12)
    strayed = next(e for e in old.letters if is_parcel(e) and e.recipient == 11 and e.sender != 12)
    cases = (
        (stale, "replayed"),
        (strayed, "misdirected"),
        (strayed._replace(recipient=12), "misdirected"),
        (stale._replace(sender=12, recipient=12), "invalid"),
        (stale._replace(sender=next(k for k in world.numbers if k not in (12, stale.sender))), "altered"),
    )
    for round, (extra, kind) in enumerate(cases, start=2):
        transport = InMemoryTransport(
            world.peers, tamper=lambda step, to, e, extra=extra: (*e, extra) if (step, to) == (2, 12) else e
        )
        terms, faults = world.exchange(transport, round=round)
        assert [(f.kind, f.peer, f.witness) for f in faults] == [(kind, extra.sender, 12)]
        assert world.outcome(terms) == world.expected(terms)


# --- peers that break the rules themselves ---


class Overpromising(Peer):
    """Announces a layer more than it sends."""

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        return super()._letter(peer, kind, number + (kind == ANNOUNCEMENT), content)


class Stingy(Peer):
    """Sends more than it announces."""

    def _letter(self, peer: int, kind: int, number: int, content: bytes | None = None) -> Letter:
        return super()._letter(peer, kind, 0 if kind == ANNOUNCEMENT else number, content)


class Doubling(Peer):
    """Sends one layer twice to the same peer, as if it were two."""

    def _send(self) -> list[Letter]:
        letters = super()._send()
        to = letters[-1].recipient
        content = pad(bytes(4) + bytes(self.sizes[0]), 4 + max(self.sizes))
        twice = [self._letter(to, SENT, number, content) for number in range(2)]
        return [e for e in letters if e.recipient != to] + [self._letter(to, ANNOUNCEMENT, 2), *twice]


class Confusing(Peer):
    """Returns layers of another index than was sent to it."""

    def _parcels(self, going: Sequence[Sent[bytes]], kind: int) -> list[Letter]:
        if kind == SENT:
            return super()._parcels(going, kind)
        return super()._parcels([s._replace(layer=(s.layer + 1) % 2) for s in going], kind)


class Garbling(Peer):
    """Signs parcels that nobody can open."""

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
    """Signs its keys with an identity that nobody knows."""

    def _enter(self, terms: Terms) -> None:
        self.identity = Ed25519PrivateKey.generate()
        super()._enter(terms)


class Forging(Peer):
    """Writes in another's name."""

    def handle(self, request: bytes) -> bytes:
        answer = Answer.decode(super().handle(request), self.number)
        return Answer(tuple(e._replace(sender=10) for e in answer.letters), answer.fault).encode()


class Babbling(Peer):
    """Answers with what is no answer."""

    def handle(self, request: bytes) -> bytes:
        super().handle(request)
        return b"\x00" * 7 + b"\x05hello"


class Lenient(Peer):
    """Has rules of its own."""

    def _meet(self, letters: Sequence[Letter]) -> None:
        self.rules = Rules(self.rules.repeats, 1, 1)
        super()._meet(letters)


@pytest.mark.parametrize(
    ("kind_of_peer", "fault"),
    [
        (Overpromising, "missing"),
        (Stingy, "unannounced"),
        (Doubling, "duplicated"),
        (Confusing, "invalid"),
        (Garbling, "invalid"),
        (Shrinking, "invalid"),
        (Posing, "impostor"),
        (Forging, "invalid"),
        (Babbling, "damaged"),
    ],
)
def test_a_peer_that_breaks_the_exchange_is_named_and_left_out(kind_of_peer: type[Peer], fault: str) -> None:
    # Two layers of one size, so that only the index tells them apart.
    world = World(4, sizes=(40, 40), rules=Rules(1, 2, 2), kinds={13: kind_of_peer})
    world.offer()
    outcome = run_exchange(InMemoryTransport(world.peers), world.terms(), world.rules)
    assert {(f.kind, f.peer) for f in outcome.faults} == {(fault, 13)}
    assert outcome.terms.peers == (10, 11, 12)
    found = world.outcome(outcome.terms)
    for unit in range(2):
        assert sorted(m[unit] for m in found.values()) == sorted(world.models[k][unit] for k in (10, 11, 12))


def test_other_rules_or_another_server_key_show_up_at_once() -> None:
    world = World(4, kinds={13: Lenient}, fewest=4)
    with pytest.raises(ExchangeAborted) as caught:
        world.exchange(InMemoryTransport(world.peers))
    assert {fault.kind for fault in caught.value.faults} == {"disagrees"}
    assert {k: peer.layers for k, peer in world.peers.items()} == world.models

    class TwoKeys(InMemoryTransport):
        """A server that gives one peer a key of its own, to know that peer's layers by it."""

        def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
            own = Terms("run", 1, "before_upload", 0, world.numbers, ServerKey().public)
            asked = {k: Request.decode(data) for k, data in requests.items()}
            return super().carry(
                {k: Request("begin", own).encode() if k == 11 and r.terms else r.encode() for k, r in asked.items()}
            )

    world = World(4, fewest=4)
    with pytest.raises(ExchangeAborted) as caught:
        world.exchange(TwoKeys(world.peers))
    assert {fault.kind for fault in caught.value.faults} == {"disagrees"}
    assert {fault.peer for fault in caught.value.faults} >= {11}


def test_what_the_server_must_not_ask_is_refused() -> None:
    world = World(3)
    world.peers[10].fewest = 3
    key = ServerKey().public
    for terms, kind, text in (
        (Terms("run", 1, "before_upload", 0, (10, 11), KEY.public), "invalid", "2 of at least 3 peers"),
        (Terms("run", 1, "before_upload", 0, (10, 11, 99), KEY.public), "invalid", "identity of peer 99"),
        (Terms("run", 1, "before_upload", 0, (11, 12), KEY.public), "invalid", "list of peers"),
        (Terms("run", 1, "before_lunch", 0, (10, 11, 12), KEY.public), "invalid", "before_lunch"),
        (Terms("run", 1, "before_upload", 0, (10, 11, 12), b""), "invalid", "no server key"),
        (Terms("run", 1, "before_upload", 0, (10, 11, 12), KEY.public), None, ""),
        (Terms("run", 1, "before_upload", 0, (10, 11, 12), KEY.public), "replayed", "terms that were used already"),
        (Terms("run", 2, "before_upload", 0, (10, 11, 12), key), "disagrees", "another key than before"),
    ):
        world.offer()
        answer = Answer.decode(world.peers[10].handle(Request("begin", terms).encode()), 10)
        if kind is None:
            assert answer.fault is None
            continue
        assert answer.fault is not None
        assert (answer.fault.kind, answer.fault.peer) == (kind, SERVER)
        assert text in str(answer.fault)
        assert world.peers[10].layers == world.models[10]
    for request in (Request("letters").encode(), b"nonsense", b""):
        answer = Answer.decode(world.peers[10].handle(request), 10)
        assert answer.fault is not None
        assert answer.fault.peer == SERVER
    world.peers[10].fewest = 9
    with pytest.raises(ExchangeAborted, match=r"the server: .*3 of at least 9 peers"):
        world.exchange(InMemoryTransport(world.peers), round=7)


def test_the_server_notices_copied_altered_and_missing_layers() -> None:
    world = World(3)
    terms, _ = world.exchange(InMemoryTransport(world.peers))
    uploads = {k: list(peer.layers) for k, peer in world.peers.items()}
    copied = {**uploads, 11: [uploads[10][0], *uploads[11][1:]]}
    altered = {**uploads, 12: [*uploads[12][:2], flipped(uploads[12][2], 60)]}
    swapped = {**uploads, 12: [uploads[12][1], uploads[12][0], uploads[12][2]]}
    for spoilt, kind, peer in ((copied, "duplicated", 11), (altered, "invalid", 12), (swapped, "invalid", 12)):
        with pytest.raises(ProtocolViolation) as caught:
            KEY.open_models(spoilt, terms)
        assert (caught.value.kind, caught.value.peer) == (kind, peer)
    with pytest.raises(ProtocolViolation, match=r"peer 12: .*2 of 3 layers uploaded"):
        KEY.open_models({**uploads, 12: uploads[12][:2]}, terms)
    world.peers[11].abort()  # the round is given up, even after the commitment
    assert world.peers[11].layers == world.models[11]


def test_a_peer_without_sense_cannot_be_made() -> None:
    identity = Ed25519PrivateKey.generate()
    known = {1: identity.public_key()}
    with pytest.raises(InvalidValue, match=r"the identities name peers \[1\], not peer 2 itself"):
        Peer(2, identity, known, Rules())
    with pytest.raises(InvalidValue, match="fewest must be at least 1, not 0"):
        Peer(1, identity, known, Rules(), fewest=0)
    peer = Peer(1, identity, known, Rules(1, 3, 3))
    with pytest.raises(InvalidValue, match="low must be at most 2"):
        peer.offer([b"a", b"b"])
    with pytest.raises(InvalidValue, match="at least one byte"):
        peer.offer([b"a", b"", b"c"])
