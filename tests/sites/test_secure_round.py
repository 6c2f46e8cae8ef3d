"""Secure recombination over Flower equals a simulation, loses no layers after faults, and hides
layers from the server.
"""

from __future__ import annotations

import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedloom.algorithm.method import components
from fedloom.algorithm.records import INTEGERS
from fedloom.algorithms.fedmr import FedMR
from fedloom.common.errors import InvalidValue
from fedloom.engines.rows import RowsEngine
from fedloom.flat.layout import Layout
from fedloom.parts.building import build
from fedloom.rounds.engine import Answer
from fedloom.rounds.federation import Federation
from fedloom.secure import Rules, to_layers
from fedloom.secure.wire import Letter, PeerMessage, Terms, unpack
from fedloom.secure.wire import pack as pack_parts
from fedloom.sites.agreement import deployment
from fedloom.sites.client_app import app
from fedloom.sites.keys import make_keys
from fedloom.sites.messages import ARRAYS, Refusal, encoded, pack, parcel_of
from fedloom.sites.secure_round import require_supported
from flower_support import (
    RUN,
    NormNet,
    assert_close,
    flower,
    nodes,
    run_config,
    schedule,
    selected,
    site,
    words_of,
)
from secure_sites import Change, ExchangeGrid, PeerNode, on_the_wire, peers

UNITS = Layout(NormNet()).units("layer")
ONE, TWO, THREE = selected(2)
SHORT = "secure(fedmr, repeats=1)"


def node(grid: ExchangeGrid, number: int) -> PeerNode:
    simulated_site = site(grid, number)
    assert isinstance(simulated_site, PeerNode)
    return simulated_site


def started(
    folder: Path, algorithm: str, rounds: int = 2, choices: str = "rehearsed"
) -> tuple[Federation, ExchangeGrid]:
    """Return a federation of sites with peer keys; the server does not wait for late sites."""
    config = run_config(algorithm, folder / "run", rounds=rounds)
    grid = peers(folder, config, choices)
    federation = flower(config, grid)
    federation.engine.sites.deadline = 0.01  # type: ignore[attr-defined]
    return federation, grid


def on_one_machine(folder: Path, algorithm: str, rounds: int) -> Federation:
    settings = deployment(run_config(algorithm, folder, rounds=rounds))
    task = settings.configuration.task(3)
    federation = Federation(build(algorithm), task, RowsEngine(task), schedule(settings))
    federation.run()
    return federation


def trained(folder: Path, number: int) -> list[bytes]:
    """Return the trained layers of a site from its disk."""
    (path,) = folder.glob(f"site-{number}/*/site-*.trained")
    return unpack(path.read_bytes(), number)[1:]


def pool(federation: Federation) -> torch.Tensor:
    (fedmr,) = [method for method in components(federation.algorithm) if isinstance(method, FedMR)]
    return fedmr.state["pool"]


def by_layer(models: list[list[bytes]]) -> list[list[bytes]]:
    return [sorted(layers) for layers in zip(*models, strict=True)]


def require_whole(
    folder: Path, federation: Federation, dispatched: torch.Tensor, absent: set[int]
) -> None:
    """Require that the pool has each uploaded layer once, and the dispatched model of each absent
    site.
    """
    selected = federation.history[-1]["clients"]
    rows = [
        to_layers(dispatched[slot], UNITS) if number in absent else trained(folder, number)
        for slot, number in enumerate(selected)
    ]
    assert by_layer([to_layers(row, UNITS) for row in pool(federation)]) == by_layer(rows)


# --- the same numbers ---


@pytest.mark.parametrize(
    "algorithm",
    [
        "secure(fedmr, when='before_upload')",
        "secure(fedmr, when='before_train')",
        "secure(fedavg(weighted=false), repeats=1)",
        "stages(fedavg:1, secure(fedmr, low=2, high=3))",
        "umf(secure(fedmr, repeats=1))",
        "secure(umf(fedmr), repeats=1)",
        "ala(secure(fedmr, repeats=1))",
    ],
)
def test_an_exchange_between_sites_moves_what_a_simulation_moves(
    algorithm: str, tmp_path: Path
) -> None:
    deployed, _ = started(tmp_path, algorithm)
    deployed.run()
    expected = on_one_machine(tmp_path, algorithm, 2)
    carried, moved = (federation.history[-1]["peer_bytes"] for federation in (deployed, expected))
    assert carried > moved > 0
    assert_close(deployed, expected, except_for={"peer_bytes"})
    assert not any(record["faults"] for record in deployed.history)


def test_with_secret_choices_the_layers_are_the_same_in_other_models(tmp_path: Path) -> None:
    deployed, _ = started(tmp_path, "secure(fedmr, repeats=4)", rounds=1, choices="secret")
    deployed.run()
    expected = on_one_machine(tmp_path, "secure(fedmr, repeats=4)", 1)
    ours, theirs = (
        [to_layers(row, UNITS) for row in pool(federation)] for federation in (deployed, expected)
    )
    torch.testing.assert_close(deployed.model(), expected.model(), rtol=0, atol=1e-6)
    assert len(by_layer(ours)) == len(UNITS)
    require_whole(tmp_path, deployed, pool(deployed), set())
    assert by_layer(ours) == by_layer(theirs)


# --- privacy against the server ---


def test_no_layer_is_in_any_message_in_clear(tmp_path: Path) -> None:
    federation, grid = started(tmp_path, "secure(fedmr)", choices="secret")
    federation.step()
    dispatched = [layer for row in pool(federation) for layer in to_layers(row, UNITS)]
    began = len(grid.sent)
    federation.step()
    trained_layers = [layer for number in selected(2) for layer in trained(tmp_path, number)]
    answers = [
        on_the_wire(answer)
        for peer in grid.nodes.values()
        for answer in getattr(peer, "answers", [])
    ]
    wire = b"".join([*answers, *map(on_the_wire, grid.sent[:began])])
    everything = wire + b"".join(map(on_the_wire, grid.sent[began:]))
    # A bias before batch normalisation has no gradient, so training may leave it unchanged.
    sent_pieces = {piece for layer in dispatched for piece in pieces(layer)}
    for layer in trained_layers:
        fresh = [piece for piece in pieces(layer) if piece not in sent_pieces]
        assert len(fresh) >= len(pieces(layer)) - 1
        assert not any(piece in everything for piece in fresh)
    for layer in dispatched:
        assert not any(piece in b"".join(answers) for piece in pieces(layer))
        assert any(piece in everything for piece in pieces(layer)), "the server did not send it"


def pieces(layer: bytes) -> list[bytes]:
    return [layer[start : start + 32] for start in range(0, len(layer) - 31, 32)]


def test_keys_are_for_the_site_alone_and_gone_after_the_round(tmp_path: Path) -> None:
    federation, grid = started(tmp_path, SHORT, rounds=1)
    modes: dict[str, int] = {}

    def look(letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
        modes.update(
            {
                path.stem: stat.S_IMODE(path.stat().st_mode)
                for path in tmp_path.glob("site-*/*/site-*.peer")
            }
        )
        return letters

    node(grid, selected(1)[0]).change = (2, look)
    federation.run()
    assert modes == {f"site-{number:06d}": 0o600 for number in selected(1)}
    assert list(tmp_path.glob("site-*/*/*.peer")) == []
    paths = list(tmp_path.glob("site-*/*/site-*.trained"))
    assert len(paths) == 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in paths)


def job(**words: Any) -> dict[str, Any]:
    round_settings = {
        "number": 1, "rounds": 1, "seed": 3, "clients": 6, "participants": 3, "learning_rate": 0.05,
        "initial_learning_rate": 0.05, "rate_change": 1.0, "selected": [0, 1, 2], "poisson": False,
    }  # fmt: skip
    return {
        "federation": "0123456789abcdef",
        "round": round_settings,
        "site": 0,
        "client": 0,
        "memory": 0,
        **words,
    }


def test_a_server_that_asks_for_a_model_before_the_exchange_does_not_get_it(tmp_path: Path) -> None:
    config = run_config(SHORT, tmp_path / "run")
    grid = peers(tmp_path, config)
    task = deployment(config).configuration.task(3)
    expected = {"model": [task.layout.size], INTEGERS: [task.layout.integers]}
    inbox = {"model": task.initial.unsqueeze(0), INTEGERS: task.initial_integers.unsqueeze(0)}
    reply = answer_to(grid, "train", job(expected=expected, exchanged=False), inbox)
    assert words_of(reply)["site"] == 0
    assert sorted(reply.content.array_records[ARRAYS]) == [INTEGERS]
    upload = job(run="mine", when="before_upload", upload=True)
    with pytest.raises(Refusal, match="this site does not take part in this exchange"):
        words_of(answer_to(grid, "query.exchange", upload))
    with pytest.raises(Refusal, match="no exchange takes place sometimes in round 1"):
        words_of(
            answer_to(
                grid,
                "query.exchange",
                job(run="mine", when="sometimes"),
                parcel=begun(when="sometimes"),
            )
        )
    for changes in ({"run": "another"}, {"round": 2}, {"when": "before_train"}):
        with pytest.raises(Refusal, match="the terms belong to another exchange"):
            words_of(
                answer_to(
                    grid,
                    "query.exchange",
                    job(run="mine", when="before_upload"),
                    parcel=begun(**changes),
                )
            )
    with pytest.raises(Refusal, match="this site does not take part in this exchange"):
        words_of(
            answer_to(
                grid, "train", job(expected=expected, exchanged=True), {INTEGERS: inbox[INTEGERS]}
            )
        )


def begun(**changes: Any) -> bytes:
    """Return a request to begin an exchange between sites 0 and 1."""
    return PeerMessage(
        "begin",
        replace(Terms("mine", 1, "before_upload", 0, (0, 1), bytes(32), Rules(1), (1,)), **changes),
    ).encode()


def answer_to(
    grid: ExchangeGrid,
    kind: str,
    words: dict[str, Any],
    inbox: dict[str, torch.Tensor] | None = None,
    parcel: bytes = b"",
) -> Message:
    """Return the answer of site 0 to a message."""
    arrays = {name: encoded(tensor) for name, tensor in (inbox or {}).items()}
    message = Message(pack(words, arrays, parcel=parcel), 1, kind)
    return app(
        message, Context(RUN, 1, dict(site(grid, 0).config), RecordDict(), dict(grid.run_config))
    )


def test_a_process_that_hands_messages_over_loads_neither_pytorch_nor_data() -> None:
    code = (
        "import sys, fedloom.sites.client_app; print(sys.modules.keys() & {'torch', "
        "'sklearn', 'scipy'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "set()"


# --- faults ---


@pytest.mark.parametrize("when", ["before_train", "before_upload"])
@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_site_that_leaves_is_named_and_the_others_exchange_without_it(
    when: str, step: int, tmp_path: Path
) -> None:
    federation, grid = started(tmp_path, SHORT)
    peer = node(grid, TWO)
    peer.when, peer.round, peer.leaves = when, "2", step
    federation.step()
    original = pool(federation)
    record, _ = federation.step()
    assert [
        (fault["client"], "stopped answering" in fault["reason"]) for fault in record["faults"]
    ] == [(TWO, True)]
    assert "no reply within 0.01 s" in record["faults"][0]["reason"]
    require_whole(tmp_path, federation, original, {TWO})


def test_a_site_whose_upload_is_lost_is_named_and_what_the_others_uploaded_is_used(
    tmp_path: Path,
) -> None:
    """A site without an upload is reported, and the server uses the uploads of the other sites.

    The sites exchange no second time without it. The difference would reveal the owner of the
    missing layers to the server.
    """
    federation, grid = started(tmp_path, SHORT)
    peer = node(grid, THREE)
    peer.round, peer.drops_upload = "2", True
    federation.step()
    original = pool(federation)
    record, _ = federation.step()
    assert [fault["client"] for fault in record["faults"]] == [THREE]
    layers = by_layer([to_layers(row, UNITS) for row in pool(federation)])
    sources = by_layer(
        [*(trained(tmp_path, number) for number in selected(2)), to_layers(original[2], UNITS)]
    )
    assert all(
        Counter(drawn) <= Counter(available)
        for drawn, available in zip(layers, sources, strict=True)
    )
    assert all(
        layer in drawn for drawn, layer in zip(layers, to_layers(original[2], UNITS), strict=True)
    )
    assert record["bytes_up"] == 2 * (4 * original.shape[1] + 8)
    begun = [message for message in grid.sent if message.metadata.message_type == "query.exchange"]
    attempts = [
        PeerMessage.decode(parcel_of(message)).terms for message in begun if parcel_of(message)
    ]
    upload_terms = [
        terms
        for terms in attempts
        if terms is not None and (terms.when, terms.round) == ("before_upload", 2)
    ]
    assert {terms.run for terms in upload_terms} == {upload_terms[0].run}
    assert {terms.attempt for terms in upload_terms} == {0}


def test_a_model_that_was_uploaded_is_never_exchanged_again(tmp_path: Path) -> None:
    """A site never exchanges an uploaded model again, even if the server restarts the round or
    denies the training.
    """
    federation, grid = started(tmp_path, "secure(fedmr, repeats=1, when='before_upload')", rounds=1)
    began = len(grid.sent)
    federation.run()
    requests = grid.sent[began:]
    number = selected(1)[0]
    peer = node(grid, number)
    trainings = [
        m for m in requests if m.metadata.message_type == "train" and words_of(m)["site"] == number
    ]
    begin = next(
        m
        for m in requests
        if m.metadata.message_type == "query.exchange"
        and words_of(m)["site"] == number
        and parcel_of(m)
    )
    # Train the same model again.
    assert words_of(peer.answer(trainings[0], grid.run_config, 1))["site"] == number
    answer = PeerMessage.decode(parcel_of(peer.answer(begin, grid.run_config, 1)), number)
    assert answer.fault is not None
    assert answer.fault.detail == "this model was uploaded before"


def test_when_too_few_are_left_everybody_sits_out_the_round(tmp_path: Path) -> None:
    federation, grid = started(tmp_path, SHORT)
    for number in (ONE, THREE):
        peer = node(grid, number)
        peer.round, peer.leaves = "2", 1
    federation.step()
    original = pool(federation)
    record, _ = federation.step()
    reasons = {fault["client"]: fault["reason"] for fault in record["faults"]}
    assert reasons.keys() == {ONE, TWO, THREE}
    assert "exchange aborted with 1 of at least 2 peers left" in reasons[TWO]
    assert torch.equal(original, pool(federation))
    assert record["bytes_up"] == 0


def test_a_site_wants_company_of_two_unless_its_owner_asks_for_less(tmp_path: Path) -> None:
    federation, grid = started(tmp_path, SHORT)
    for peer in grid.nodes.values():
        del peer.config["fewest-peers"]
    gone = node(grid, ONE)
    gone.round, gone.leaves = "2", 1
    federation.step()
    original = pool(federation)
    record, _ = federation.step()
    reasons = {fault["client"]: fault["reason"] for fault in record["faults"]}
    assert reasons.keys() == {ONE, TWO, THREE}
    assert all("2 of at least 3 peers" in reasons[number] for number in (TWO, THREE))
    assert torch.equal(original, pool(federation))


def without_first(letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
    return letters[1:]


def twice(letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
    return (*letters, letters[0])


def altered(letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
    letter = letters[0]
    return (letter._replace(body=letter.body[:-1] + bytes([letter.body[-1] ^ 1])), *letters[1:])


def misdirected(letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
    return (letters[0]._replace(recipient=99), *letters[1:])


@pytest.mark.parametrize("when", ["before_train", "before_upload"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without_first, "did not arrive"),
        (twice, "arrived twice"),
        (altered, "was altered"),
        (misdirected, "delivered to the wrong peer"),
    ],
)
def test_letters_that_are_meddled_with_are_noticed(
    when: str, change: Change, reason: str, tmp_path: Path
) -> None:
    """A site that receives changed letters reports them.

    The server has proof that the sender is innocent, so the recipient sits out the round.
    """
    federation, grid = started(tmp_path, SHORT)
    peer = node(grid, TWO)
    peer.when, peer.round, peer.change = when, "2", (2, change)
    federation.step()
    original = pool(federation)
    record, _ = federation.step()
    ((client, fault_reason),) = [(fault["client"], fault["reason"]) for fault in record["faults"]]
    assert client == TWO
    assert "accuses without proof" in fault_reason
    assert reason in fault_reason
    require_whole(tmp_path, federation, original, {TWO})


def test_letters_of_another_stage_are_noticed(tmp_path: Path) -> None:
    federation, grid = started(tmp_path, SHORT)

    def stale(letters: tuple[Letter, ...]) -> tuple[Letter, ...]:
        noted.append(letters)
        return noted[0]

    noted: list[tuple[Letter, ...]] = []
    peer = node(grid, TWO)
    peer.round, peer.change, peer.also = "2", (2, stale), (3, stale)
    federation.step()
    original = pool(federation)
    record, _ = federation.step()
    ((client, reason),) = [(fault["client"], fault["reason"]) for fault in record["faults"]]
    assert client == TWO
    assert "belongs to another stage or exchange" in reason
    require_whole(tmp_path, federation, original, {TWO})


def test_a_site_that_fills_its_envelopes_with_garbage_spoils_only_what_it_was_to_upload(
    tmp_path: Path,
) -> None:
    """Garbage envelopes of a site spoil only the layers that it had to upload.

    The exchange hides the sender of garbage: each such layer retains the values of the server, and
    the round continues.
    """
    federation, _ = started(tmp_path, SHORT)
    federation.step()
    dispatched, spoilt = pool(federation), selected(2)[0]
    began = federation.engine.train_at_sites  # type: ignore[attr-defined]

    def trained_otherwise(*arguments: Any, **options: Any) -> Any:
        for result in began(*arguments, **options):
            if isinstance(result, Answer) and grid_number(result) == spoilt:
                (path,) = tmp_path.glob(f"site-{spoilt}/*/site-*.trained")
                head, *layers = unpack(path.read_bytes(), spoilt)
                nan = torch.tensor([torch.nan]).numpy().tobytes()
                path.write_bytes(pack_parts(head, *(nan * (len(layer) // 4) for layer in layers)))
            yield result

    def grid_number(reply: Answer) -> int:
        return int(federation.engine.numbers[reply.job.client])  # type: ignore[attr-defined]

    federation.engine.train_at_sites = trained_otherwise  # type: ignore[attr-defined]
    record, _ = federation.step()
    assert record["faults"] == []
    assert bool(pool(federation).isfinite().all())
    layers = by_layer([to_layers(row, UNITS) for row in pool(federation)])
    sources = by_layer(
        [
            *(trained(tmp_path, number) for number in selected(2)),
            *(to_layers(row, UNITS) for row in dispatched),
        ]
    )
    assert all(
        set(drawn) <= set(available) for drawn, available in zip(layers, sources, strict=True)
    )


def test_a_site_with_a_key_that_the_others_do_not_know_is_left_out(tmp_path: Path) -> None:
    federation, grid = started(tmp_path, SHORT)
    make_keys(tmp_path / "other", 6)
    number = selected(1)[1]
    directory = tmp_path / "other" / f"site-{number}"
    node(grid, number).config |= {"identity": str(directory / "site.key")}
    listed = (
        (tmp_path / "keys" / f"site-{number}" / "peers.pub").read_bytes().splitlines(keepends=True)
    )
    listed[number] = (tmp_path / "other" / "server" / f"site-{number}.pub").read_bytes()
    (tmp_path / "keys" / f"site-{number}" / "peers.pub").write_bytes(b"".join(listed))
    record, _ = federation.step()
    assert record["clients"] == list(selected(1))
    ((client, reason),) = [(fault["client"], fault["reason"]) for fault in record["faults"]]
    assert client == number
    assert "is not authenticated" in reason


# --- identity of a site ---


def test_sites_without_keys_end_the_run_before_it_begins(tmp_path: Path) -> None:
    config = run_config(SHORT, tmp_path / "run")
    grid = ExchangeGrid(dict(nodes(6, tmp_path)), config)
    with pytest.raises(InvalidValue, match=r"needs the keys of the sites: set its key"):
        flower(config, grid)


def test_a_method_of_which_sites_cannot_tell_when_it_leads_is_refused() -> None:
    with pytest.raises(InvalidValue, match="give a last round instead of auto"):
        require_supported(build("stages(fedavg:auto, secure(fedmr))"))
    require_supported(build("stages(fedavg:auto, fedmr)"))
