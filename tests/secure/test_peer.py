"""Exchanges with real envelopes and letters between peers in memory.

The tests also check the contents that each party can read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.common.errors import InvalidValue
from fedloom.secure import (
    InMemoryTransport,
    Peer,
    Rules,
    from_layers,
    rehearse,
    to_layers,
)
from fedloom.secure.envelopes import OVERHEAD, PrivateIdentity, unseal
from fedloom.secure.wire import (
    NOTE_OVERHEAD,
    SENT,
    Note,
    PeerMessage,
    read_note,
)
from secure_support import KEY, SIZES, WatchedTransport, World, choices_of, is_parcel

# --- outcomes ---


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.data(),
    st.sampled_from(["before_upload", "before_train"]),
)
@settings(max_examples=25, deadline=None)
def test_peers_end_with_the_models_of_the_simulator(
    count: int, sizes: list[int], data: st.DataObject, when: str
) -> None:
    low = data.draw(st.integers(1, len(sizes)))
    rules = Rules(
        data.draw(st.integers(1, 3)), low, data.draw(st.none() | st.integers(low, len(sizes)))
    )
    world = World(count, sizes, rules, seed=data.draw(st.integers(0, 99)), fewest=1)
    transport = WatchedTransport(world.peers)
    terms, faults = world.exchange(transport, when)
    assert faults == []
    exchanged = world.outcome(terms)
    rehearsal = rehearse(world.numbers, len(sizes), rules, choices_of(world.seed)(terms), when)
    for unit, source in enumerate(rehearsal.sources):
        layers_after = [exchanged[k][unit] for k in world.numbers]
        assert layers_after == [world.models[world.numbers[origin]][unit] for origin in source]
        assert Counter(layers_after) == Counter(model[unit] for model in world.models.values())
    parcels = [letter for letter in transport.letters if len(letter.body) > 1 and is_parcel(letter)]
    assert len(parcels) == 2 * sum(map(sum, rehearsal.sent))


def test_secret_choices_differ_from_one_exchange_to_the_next_and_keep_every_layer() -> None:
    world = World(5, rules=Rules(3, 1, 3))
    for peer in world.peers.values():
        peer.choices = Peer(10, world.identities[10], peer.identities, world.rules).choices
    outcomes = []
    for round in range(1, 9):
        terms, _ = world.exchange(InMemoryTransport(world.peers), "before_train", round)
        outcomes.append(models := world.outcome(terms))
        for unit in range(3):
            assert sorted(m[unit] for m in models.values()) == sorted(
                m[unit] for m in world.models.values()
            )
    assert any(outcome != outcomes[0] for outcome in outcomes)


def test_rows_survive_as_layers() -> None:
    row = torch.randn(11, dtype=torch.float32)
    units = [(slice(0, 3), slice(7, 9)), (slice(3, 7), slice(9, 10))]
    layers = to_layers(row, units)
    assert [len(layer) for layer in layers] == [20, 20]
    row_of_others = torch.zeros(11)
    row_of_others[10] = row[10]
    assert torch.equal(from_layers(layers, units, row_of_others), row)
    with pytest.raises(InvalidValue, match="layer 1 has 19 bytes, expected 20"):
        from_layers([layers[0], layers[1][:-1]], units, row)


# --- secrecy ---


def windows(data: bytes, length: int = 16) -> set[bytes]:
    return {data[k : k + length] for k in range(len(data) - length + 1)}


@pytest.mark.parametrize("when", ["before_upload", "before_train"])
def test_no_plaintext_passes_through_the_carrier_and_all_parcels_look_alike(when: str) -> None:
    world = World(4, rules=Rules(2, 1, 3))
    transport = WatchedTransport(world.peers)
    world.exchange(transport, when)
    secret = set().union(*(windows(layer) for model in world.models.values() for layer in model))
    assert all(not windows(captured) & secret for captured in transport.captured)
    parcels = [letter for letter in transport.letters if is_parcel(letter)]
    sealed = OVERHEAD if when == "before_upload" else 0
    assert {len(p.body) for p in parcels} == {
        8 + 4 + max(SIZES) + sealed + OVERHEAD + NOTE_OVERHEAD
    }
    encapsulated = [read_note(p.body, p.sender).payload[:32] for p in parcels]
    assert len(set(encapsulated)) == len(encapsulated)  # a fresh key, so a fresh nonce, for each
    for parcel in parcels:
        note = read_note(parcel.body, parcel.sender)
        assert unseal(note.payload, KEY.private, note.header()) is None
        assert note._replace(session=b"", payload=b"") == Note(
            b"", note.repeat, note.kind, parcel.sender, parcel.recipient, note.number
        )  # the carrier sees senders, recipients, times and numbers of letters, and no layer
    numbers: dict[tuple[int, ...], list[int]] = {}
    for parcel in parcels:
        note = read_note(parcel.body, parcel.sender)
        numbers.setdefault((note.repeat, note.kind, note.sender, note.recipient), []).append(
            note.number
        )
    assert all(sorted(group) == list(range(len(group))) for group in numbers.values())


def test_before_upload_peers_never_hold_another_s_plain_layer() -> None:
    class Watching(InMemoryTransport):
        def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
            answers = super().carry(requests)
            snapshots.extend((k, self.peers[k].snapshot()) for k in requests)
            return answers

    snapshots: list[tuple[int, bytes]] = []
    world = World(4)
    terms, _ = world.exchange(Watching(world.peers))
    assert len(snapshots) == 4 * (2 * world.rules.repeats + 3)
    for number, remembered in snapshots:
        secrets = set().union(
            *(windows(layer) for k, m in world.models.items() if k != number for layer in m)
        )
        assert not windows(remembered) & secrets
    assert world.outcome(terms) == world.expected(terms)
    assert any(
        world.peers[k].layers[unit] != world.peers[k].offered[unit]
        for k in terms.peers
        for unit in range(3)
    )


def test_a_parcel_names_its_stage_one_sender_to_its_recipient_and_nothing_else() -> None:
    """Algorithm 2 allows a recipient to read (sender, index) in stage 1.

    In stage 3 it may read a layer of an index that it sent itself.
    """
    world = World(4, rules=Rules(1, 2, 2))
    transport = WatchedTransport(world.peers)
    world.exchange(transport)
    for parcel in (letter for letter in transport.letters if is_parcel(letter)):
        note = read_note(parcel.body, parcel.sender)
        opened = unseal(note.payload, world.peers[parcel.recipient].opening, note.header())
        assert opened is not None
        index, size = int.from_bytes(opened[8:12]), int.from_bytes(opened[:8])
        assert index < 3
        assert size == 4 + SIZES[index] + OVERHEAD
        assert set(opened[8 + size :]) <= {0}
        for outsider in set(world.numbers) - {parcel.recipient}:
            assert unseal(note.payload, world.peers[outsider].opening, note.header()) is None


def test_keys_belong_to_a_run_and_envelopes_are_never_the_same() -> None:
    world = World(2)
    peer = world.peers[10]
    introductions, envelopes = [], []
    for run, round in (("one", 1), ("one", 2), ("two", 1)):
        peer.offer(world.models[10])
        answer = PeerMessage.decode(
            peer.handle(PeerMessage("begin", world.terms(round=round, run=run)).encode()), 10
        )
        introductions.append(answer.letters[0].body)
        envelopes += peer.holding.items
    assert introductions[0] == introductions[1] != introductions[2]
    assert len(set(envelopes)) == len(envelopes) == 9


def test_identities_may_be_those_of_supernodes() -> None:
    world = World(3)
    curve: dict[int, PrivateIdentity] = {
        k: ec.generate_private_key(ec.SECP384R1()) for k in world.numbers
    }
    for number, peer in world.peers.items():
        peer.identity, peer.identities = (
            curve[number],
            {k: key.public_key() for k, key in curve.items()},
        )
    terms, faults = world.exchange(InMemoryTransport(world.peers))
    assert faults == []
    assert world.outcome(terms) == world.expected(terms)


@pytest.mark.parametrize("when", ["before_upload", "before_train"])
def test_peers_may_be_restarted_before_every_request(when: str) -> None:
    class Restarting(InMemoryTransport):
        def carry(self, requests: Mapping[int, bytes]) -> Mapping[int, bytes]:
            for number in requests:
                running = self.peers[number]
                restarted = Peer(
                    number,
                    running.identity,
                    running.identities,
                    running.rules,
                    fewest=1,
                    choices=running.choices,
                )
                restarted.offer(running.offered)
                restarted.restore(running.snapshot())
                self.peers[number] = restarted
            return super().carry(requests)

    world = World(3)
    transport = Restarting(world.peers)
    for round in (1, 2):
        terms, faults = world.exchange(transport, when, round)
        world.peers = dict(transport.peers)
        assert faults == []
        restored = Peer(10, world.identities[10], world.peers[10].identities, world.rules)
        restored.restore(world.peers[10].snapshot())
        assert restored.layers == world.peers[10].layers
        assert world.outcome(terms) == world.expected(terms)


@pytest.mark.parametrize("colluding", [(13,), (12, 13)])
def test_colluding_peers_and_server_learn_of_an_honest_peer_only_the_layers_it_sent_them(
    colluding: tuple[int, ...],
) -> None:
    """Colluders open all parcels for them, and envelopes for the server inside these parcels."""
    repeats: Counter[int] = Counter()
    for seed in range(1, 5):
        world = World(5, rules=Rules(2, 1, 2), seed=seed)
        world.offer()
        transport = WatchedTransport(world.peers)
        terms, _ = world.exchange(transport)
        learned: Counter[int] = Counter()
        for letter in (
            sent for sent in transport.letters if is_parcel(sent) and sent.sender not in colluding
        ):
            note = read_note(letter.body, letter.sender)
            keys = [world.peers[k].opening for k in colluding] + [KEY.private]
            opened = [
                content
                for key in keys
                if (content := unseal(note.payload, key, note.header())) is not None
            ]
            assert bool(opened) == (letter.recipient in colluding)
            if opened and note.kind == SENT:
                content = opened[0][8 : 8 + int.from_bytes(opened[0][:8])]
                index = int.from_bytes(content[:4])
                layer = unseal(content[4:], KEY.private, terms.layer_context(index))
                from_sender = layer == world.models[letter.sender][index]
                assert from_sender or note.repeat > 1, (
                    "in the first repeat a peer sends layers of its own"
                )
                learned[letter.sender] += note.repeat == 1
                repeats[note.repeat] += 1
        assert max(learned.values(), default=0) <= 2  # n_u
    assert repeats[1] > 0
    assert repeats[2] > 0
