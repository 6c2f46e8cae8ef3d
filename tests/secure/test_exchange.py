"""The four stages of the exchange without peers and in the simulator.

The tests cover invariants, traffic and the distribution of destinations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from fedloom.algorithm.records import Replies, Selection
from fedloom.common.errors import InvalidValue
from fedloom.common.randomness import stream
from fedloom.common.round import Round
from fedloom.engines.rows import RowsEngine
from fedloom.flat.population import squared_distances
from fedloom.parts.building import build
from fedloom.parts.secure_recombination import Secure, exchange_
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.secure import Rehearsal, Rules, rehearse, stream_choices
from fedloom.secure.exchange import Choices, LayerBuffers, Sent, sample, stream_draw
from naive import World


def seeded(seed: int) -> Choices:
    return stream_choices(lambda purpose, peer: stream(seed, purpose, client=peer))


def one_stream(seed: int) -> Choices:
    """Take all choices from one stream, for the speed of many exchanges in a row."""
    draws = stream_draw(stream(seed, "test"))
    return lambda peer, purpose: draws


@st.composite
def settings_of_an_exchange(draw: st.DrawFn) -> tuple[int, int, Rules]:
    units = draw(st.integers(1, 6))
    low = draw(st.integers(1, units))
    high = draw(st.none() | st.integers(low, units))
    return draw(st.integers(1, 7)), units, Rules(draw(st.integers(1, 4)), low, high)


# --- invariants ---


@given(settings_of_an_exchange(), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_every_layer_of_every_model_stays_exactly_once(
    case: tuple[int, int, Rules], seed: int
) -> None:
    count, units, rules = case
    peers = [3 * k + 1 for k in reversed(range(count))]
    sources = rehearse(peers, units, rules, seeded(seed), "before_upload").sources
    assert [sorted(source) for source in sources] == [list(range(count))] * units
    rows = torch.randint(-1000, 1000, (count, 3 * units), generator=stream(seed, "rows")).double()
    slices = [
        (slice(2 * u, 2 * u + 2), slice(2 * units + u, 2 * units + u + 1)) for u in range(units)
    ]
    original = rows.clone()
    moved = rows.clone()
    exchange_(moved, rows, slices, sources, torch.arange(count))
    assert torch.equal(rows, original)
    for index in range(count):
        for unit, unit_slices in enumerate(slices):
            for columns in unit_slices:
                assert torch.equal(moved[index, columns], rows[sources[unit][index], columns])
    center = torch.randint(-1000, 1000, (3 * units,), generator=stream(seed, "center")).double()
    assert torch.equal(moved.sum(0), rows.sum(0))  # whole numbers: sums are exact in any order
    assert torch.equal((moved - center).square().sum(), (rows - center).square().sum())
    assert squared_distances(moved).sum() == squared_distances(rows).sum()


def test_one_peer_keeps_everything() -> None:
    rehearsal = rehearse([5], 3, Rules(2, 3, 3), seeded(0), "before_train")
    assert rehearsal == Rehearsal([[0], [0], [0]], [[0, 0, 0], [0, 0, 0]])


def test_all_buffers_are_empty_before_the_second_stage_when_all_layers_are_sent() -> None:
    draws = stream_draw(stream(1, "test"))
    peer = LayerBuffers([1, 2], [["a"], ["b"]])
    going = peer.send(2, 2, draws)
    assert peer.buffers == [[], []]
    assert sorted((sent.layer, sent.item) for sent in going) == [(0, "a"), (1, "b")]
    returned = peer.exchange([Sent(1, 0, "x"), Sent(2, 0, "y")], draws)
    assert sorted((sent.peer, sent.layer) for sent in returned) == [(1, 0), (2, 0)]
    assert sorted(sent.item for sent in returned) == ["x", "y"]
    assert peer.buffers == [[], []]
    peer.rebuild([Sent(sent.peer, sent.layer, "z") for sent in going])
    assert peer.items == ["z", "z"]


def test_two_peers_swap_or_keep() -> None:
    orders = {
        tuple(rehearse([0, 1], 1, Rules(1, 1, 1), seeded(s), "before_upload").sources[0])
        for s in range(20)
    }
    assert orders == {(0, 1)}  # each layer meets an empty buffer and returns
    orders = {
        tuple(rehearse([0, 1], 2, Rules(1, 1, 1), seeded(s), "before_upload").sources[0])
        for s in range(40)
    }
    assert orders == {(0, 1), (1, 0)}


def test_choices_do_not_depend_on_the_order_of_arrival() -> None:
    letters = [Sent(peer, layer, f"{peer}{layer}") for peer in (1, 2, 3) for layer in (0, 1)]
    outcomes = []
    for arrived in (letters, letters[::-1], sample(letters, 6, stream_draw(stream(2, "test")))):
        peer = LayerBuffers([1, 2, 3], [["00"], ["01"]])
        outcomes.append(peer.exchange(arrived, stream_draw(stream(3, "test"))))
    assert outcomes[0] == outcomes[1] == outcomes[2]


# --- traffic ---


def test_bytes_are_equation_26_and_on_average_equation_27() -> None:
    peers, sizes, rules = range(5), [7, 100, 31, 2], Rules(2, 1, 3)
    choices, total, exchanges = one_stream(4), 0, 1500
    for _ in range(exchanges):
        total += rehearse(peers, 4, rules, choices, "before_upload").bytes(sizes)
    expected = 2 * (1 + 3) * 5 / 4 * sum(sizes)
    assert sum(map(sum, rules.bounds(4))) / 4 * 5 * sum(sizes) == expected
    assert total / exchanges == pytest.approx(expected, rel=0.01)
    counted = rehearse(peers, 4, rules, seeded(1), "before_upload")
    assert counted.bytes(sizes) == sum(
        2 * n * size for sent in counted.sent for n, size in zip(sent, sizes, strict=True)
    )
    assert all(1 * 5 <= sum(sent) <= 3 * 5 for sent in counted.sent)


def test_without_an_upper_bound_the_first_repeat_sends_at_most_a_quarter() -> None:
    assert Rules(3).bounds(10) == [(1, 3), (1, 10), (1, 10)]
    assert Rules(2, low=5).bounds(10) == [(5, 5), (5, 10)]
    assert Rules(2, 1, 2).bounds(2) == [(1, 2), (1, 2)]


# --- distribution of destinations ---


def exact_destinations(count: int, sent: Fraction) -> list[Fraction]:
    """Return the exact probability that layer 0 of peer 0 ends at each peer after one repeat.

    Each peer sends this index with probability `sent`, to one of the others. Each recipient
    distributes its layers uniformly over the senders and, if it did not send its layer, itself.
    """
    result = [Fraction(0)] * count
    options = [[peer, *(k for k in range(count) if k != peer)] for peer in range(count)]
    for goes in itertools.product(*options):
        chance = Fraction(1)
        for peer, to in enumerate(goes):
            chance *= 1 - sent if to == peer else sent / (count - 1)
        gathered = [peer for peer, to in enumerate(goes) if to == goes[0]]
        for peer in gathered:
            result[peer] += chance / len(gathered)
    assert sum(result) == 1
    return result


@pytest.mark.parametrize(
    ("count", "units", "low", "high"), [(3, 1, 1, 1), (3, 2, 1, 2), (4, 3, 1, 2), (5, 2, 2, 2)]
)
def test_destinations_follow_the_exact_distribution(
    count: int, units: int, low: int, high: int
) -> None:
    exact = exact_destinations(count, Fraction(low + high, 2 * units))
    choices, number = one_stream(count), 3000
    counts: Counter[int] = Counter()
    for _ in range(number):
        counts[
            rehearse(range(count), units, Rules(1, low, high), choices, "before_upload")
            .sources[units - 1]
            .index(0)
        ] += 1
    observed = [counts[peer] for peer in range(count)]
    assert chisquare(observed, [float(p) * number for p in exact]).pvalue > 1e-3
    away = observed[1:]
    assert len(set(exact[1:])) == 1  # after the first move, all places have equal probability
    assert chisquare(away).pvalue > 1e-3


def test_after_many_repeats_a_layer_is_uniform_over_peers() -> None:
    choices, counts = one_stream(9), Counter[int]()
    for _ in range(400):
        for source in rehearse(range(4), 3, Rules(12, 1, 3), choices, "before_upload").sources:
            counts[source.index(2)] += 1
    assert chisquare([counts[peer] for peer in range(4)]).pvalue > 1e-3


def test_layers_of_one_model_scatter_independently() -> None:
    choices, counts = one_stream(5), Counter[tuple[int, int]]()
    for _ in range(1500):
        first_layer, second_layer = rehearse(
            range(3), 2, Rules(8, 1, 2), choices, "before_upload"
        ).sources
        counts[first_layer.index(0), second_layer.index(0)] += 1
    assert chisquare([counts[pair] for pair in itertools.product(range(3), repeat=2)]).pvalue > 1e-3


# --- in the simulator ---


def federation(
    expression: str, rounds: int = 3, directory: Path | None = None, dropout: float = 0.0
) -> Federation:
    task = World(norm=True).task()
    schedule = Schedule(rounds=rounds, participation=0.6, seed=3, evaluate_every=1, dropout=dropout)
    return Federation(build(expression), task, RowsEngine(task), schedule, directory)


def test_the_exchange_moves_downloads_and_uploads() -> None:
    run = federation("secure(indep, repeats=3, low=1, high=3)")
    method = run.algorithm
    assert isinstance(method, Secure)
    run.step()
    pipeline = run.pipeline
    pool = method.method.state["pool"].clone()
    units, round = (
        run.task.layout.units("layer"),
        Round(2, 3, 3, 7, 4, 0.1, 0.1, selected=(5, 0, 6, 2)),
    )
    exchange = pipeline.open(round, Selection(round.selected))
    sent = exchange.moved["model"]
    choices = stream_choices(lambda purpose, peer: stream(3, purpose, round=2, client=peer))
    expected = rehearse([5, 0, 6, 2], 3, Rules(3, 1, 3), choices, "before_train").sources
    for unit, source in zip(units, expected, strict=True):
        for index, origin in enumerate(source):
            assert all(torch.equal(sent[index, columns], pool[origin, columns]) for columns in unit)
    assert not torch.equal(sent, pool)
    rows = torch.randn(3, run.task.layout.size, dtype=torch.float64)
    slots = torch.tensor([0, 2, 3])
    matrix = torch.zeros(4, rows.shape[1], dtype=rows.dtype).index_copy(0, slots, rows)
    clients = torch.tensor([5, 6, 2])
    pipeline.close(exchange, Replies({"model": matrix}, clients, slots, torch.ones(3), exchange))
    sources_before_upload = rehearse([5, 6, 2], 3, Rules(3, 1, 3), choices, "before_upload").sources
    # it dropped out: its slot is unchanged
    assert torch.equal(method.method.state["pool"][1], pool[1])
    for unit, source in zip(units, sources_before_upload, strict=True):
        for slot, origin in zip((0, 2, 3), source, strict=True):
            assert all(
                torch.equal(method.method.state["pool"][slot, columns], rows[origin, columns])
                for columns in unit
            )
    pipeline.finish(exchange)
    sizes = [sum(columns.stop - columns.start for columns in unit) * 8 for unit in units]
    both = [
        rehearse(clients, 3, Rules(3, 1, 3), choices, when).bytes(sizes)
        for clients, when in (((5, 0, 6, 2), "before_train"), ((5, 6, 2), "before_upload"))
    ]
    assert method.diagnose()["peer_bytes"] == sum(both)
    # No client replied, so there was no exchange before the upload.
    pipeline.finish(pipeline.open(round, Selection(round.selected)))
    assert method.diagnose()["peer_bytes"] == both[0]


@pytest.mark.parametrize("when", ["both", "before_upload", "before_train"])
def test_the_mean_is_fedmr_s_and_the_record_has_the_peers_bytes(when: str) -> None:
    plain, secure = (
        federation("fedmr", rounds=1),
        federation(f"secure(fedmr, when={when})", rounds=1),
    )
    plain.step()
    record, _ = secure.step()
    # In the first round all models are equal, so the exchange has no effect on the result.
    torch.testing.assert_close(secure.model(), plain.model(), rtol=1e-12, atol=1e-12)
    for columns in (columns for unit in secure.task.layout.units("layer") for columns in unit):
        pools = [run.server_state() for run in (plain, secure)]
        plain_rows, secure_rows = (
            sorted(
                map(tuple, next(t for n, t in p.items() if n.endswith("pool"))[:, columns].tolist())
            )
            for p in pools
        )
        assert plain_rows == secure_rows
    assert record["bytes_up"] == plain.history[0]["bytes_up"]
    assert record["peer_bytes"] > 0


@pytest.mark.parametrize(
    "expression",
    [
        "secure(fedmr)",
        "secure(fedmr(unit='tensor'), repeats=3, low=2, high=4, when='before_train')",
        "secure(fedmr(unit='segment', fraction=0.5), when='before_upload')",
        "secure(fedmr(local=fedprox(mu=0.1)), high=2)",
        "secure(fedmut)",
        "secure(stages(fedavg(weighted=false):1, fedmr))",
        "stages(fedavg:1, secure(fedmr))",
        "umf(secure(fedmr))",
        "secure(umf(fedmr))",
        "ala(secure(fedmr))",
        "secure(clustered(fedmr, by='size'))",
    ],
)
def test_nested_expressions_resume_bit_for_bit_and_round_trip(
    expression: str, tmp_path: Path
) -> None:
    uninterrupted = federation(expression, dropout=0.2)
    initial_state = uninterrupted.server_state()
    original = {name: tensor.clone() for name, tensor in initial_state.items()}
    uninterrupted.run()
    # replaced, never edited
    assert all(torch.equal(initial_state[name], tensor) for name, tensor in original.items())
    halted = federation(expression, directory=tmp_path, dropout=0.2)
    halted.step()
    halted.save()
    resumed = federation(expression, directory=tmp_path, dropout=0.2)
    resumed.run()
    assert resumed.history == uninterrupted.history
    state = resumed.server_state()
    assert all(
        torch.equal(state[name], tensor) for name, tensor in uninterrupted.server_state().items()
    )
    assert build(str(uninterrupted.algorithm)) == build(expression)


def test_idle_clients_are_sent_the_global_model_itself() -> None:
    run = federation("secure(umf(fedmr), repeats=3)")
    run.step()
    round = Round(2, 3, 3, 7, 4, 0.1, 0.1, selected=(5, 0, 6, 2))
    exchange = run.pipeline.open(round, Selection(round.selected, idle=(1, 3, 4), receivers=7))
    moved, sent = exchange.moved["model"], exchange.sent["model"]
    assert torch.equal(moved[4], run.model())
    assert not torch.equal(moved[:4], sent[:4])


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("secure(fedmr, repeats=0)", "repeats must be between 1 and 1000, not 0"),
        ("secure(fedmr, repeats=1000000)", "repeats must be between 1 and 1000, not 1000000"),
        ("secure(fedmr, low=0)", "low must be at least 1, not 0"),
        ("secure(fedmr, low=3, high=2)", r"high must be at least low \(3\), not 2"),
        (
            "secure(fedmr, when='before_uplod')",
            "when must be 'both', 'before_upload' or 'before_train', not 'before_uplod'",
        ),
        (
            "secure(fedavg)",
            "fedavg needs the client of each upload, which the exchange hides: set weighted=false",
        ),
        ("secure(scaffold)", "scaffold needs the client of each upload"),
        ("secure(fedamp)", "fedamp needs the client of each upload"),
        ("secure(clustered(fedmr))", "needs the client of each upload"),
        (
            "secure(umf(fedmr(blend=auto)))",
            r"fedmr\(blend='auto'\) needs the client of each upload",
        ),
        (
            "secure(fedmr(blend=auto, local=fedprox))",
            r"secure: fedmr\(.*fedprox.*\) needs the client of each upload",
        ),
    ],
)
def test_bad_expressions_are_refused_in_one_line(expression: str, text: str) -> None:
    with pytest.raises(InvalidValue, match=text) as caught:
        build(expression)
    assert "\n" not in str(caught.value)


def test_stages_that_move_different_units_are_refused() -> None:
    with pytest.raises(InvalidValue, match="move different units; put secure around each stage"):
        federation("secure(stages(fedmr:1, fedmr(unit='tensor')))")


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(
        InvalidValue, match="low and high must be at most 3, the number of a model's layers, not 9"
    ):
        federation("secure(fedmr, high=9)")
