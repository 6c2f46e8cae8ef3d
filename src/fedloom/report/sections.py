"""The written parts of the report's page, as HTML: headline, what was run, faults.

Everything that comes from a user (names, configuration, reasons of faults) goes through `html.escape`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fedloom.report.comparing import NO_BREAK, breakable
from fedloom.report.figures import Style, styles
from fedloom.report.sheet import Sheet, spread_of, words
from fedloom.report.summary import Row, RunSummary, Spread, faults
from fedloom.report.tables import byte_text, percent, time_text

Tile = tuple[str, str, str]
"""Name, figure, and what it belongs to."""

FAULT_LINES = 60
"""Kinds of faults that are listed; more are counted."""


def headline(title: str, runs: Sequence[RunSummary], tiles: Sequence[Tile]) -> str:
    """Title, one line of what was run, the most important figures, and a warning about runs that are not whole."""
    shown = "".join(
        f"<div class=tile><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    lead = " · ".join(escape(text) for text in _lead(_common([run.configuration for run in runs])))
    return f"<header><h1>{escape(title)}</h1><p class=lead>{lead}</p><dl class=tiles>{shown}</dl>{_unfinished(runs)}</header>"


def result_tiles(runs: Sequence[RunSummary], sheet: Sheet) -> list[Tile]:
    """The best accuracies and the fewest rounds to each target of one setting, and what it took."""
    rows, several = sheet.rows, len(sheet.rows) > 1
    names = {"final": "final accuracy", "best": "best accuracy"}
    if several:  # a comparison says what it goes by
        names.setdefault(sheet.measure, words(sheet.measure, sheet.last))
    tiles = []
    for measure, name in names.items():
        known = [(spread, row) for row in rows if (spread := spread_of(row, measure)) is not None]
        if known:
            spread, row = max(known, key=lambda pair: pair[0].mean)
            title = f"Highest {name}" if several else name.capitalize()
            tiles.append((title, _accuracy(spread), row.algorithm if several else ""))
    for k, reach in enumerate(rows[0].reaches):
        whole = [(row.reaches[k].rounds, row) for row in rows if row.reaches[k].reached == row.seeds]
        reached = [(spread, row) for spread, row in whole if spread is not None]
        if reached:
            spread, row = min(reached, key=lambda pair: pair[0].mean)
            rounds = f"{spread.mean:.1f}" if spread.count > 1 else f"{spread.mean:.0f}"
            tiles.append(
                (f"Fewest rounds to {percent(reach.target)}{NO_BREAK}%", rounds, row.algorithm if several else "")
            )
    return tiles + cost_tiles(len(runs), rows)


def cost_tiles(runs: int, rows: Sequence[Row]) -> list[Tile]:
    """What all runs sent and how long they took."""
    sent = sum(spread.mean * row.seeds for row in rows for spread in (row.bytes_down, row.bytes_up) if spread)
    tiles = [("Sent in all", byte_text(sent), "down and up")]
    if any(row.seconds for row in rows):
        total = sum(row.seconds.mean * row.seconds.count for row in rows if row.seconds)
        tiles.append(("Time in all", time_text(total), f"{runs} runs" if runs > 1 else ""))
    return tiles


def method_chips(runs: Sequence[RunSummary]) -> str:
    """The legend of all figures: a button a method that hides it everywhere."""
    chips = "".join(
        f'<button class=chip aria-pressed=true data-method="{escape(name)}" title="{escape(name)}">'
        f"{_stroke(style)}<span>{escape(name)}</span></button>"
        for name, style in styles(runs).items()
    )
    return f'<nav class=methods aria-label="Methods: press to hide or show, twice to show one alone">{chips}</nav>'


def what_was_run(runs: Sequence[RunSummary], command: str) -> str:
    """Configuration and environment of the runs, and the command that repeats them."""
    configuration = _facts([run.configuration for run in runs], {"algorithm", "seed", "command", "targets"})
    environment = _facts([run.environment for run in runs], {"command"})
    repeat = (
        f"<div class=command><pre><code>{escape(command)}</code></pre><button class=copy>Copy</button></div>"
        if command
        else ""
    )
    blocks = "".join(
        f"<div><h3>{name}</h3><table class='words'>{lines}</table></div>"
        for name, lines in (("Configuration", configuration), ("Versions and machine", environment))
        if lines
    )
    if not blocks and not repeat:
        return ""
    return f"<section><div class=head><h2>What was run</h2></div><div class=facts>{blocks}</div>{repeat}</section>"


def recorded_section(figures: str) -> str:
    """The figures of what was recorded on request; empty without any."""
    if not figures:
        return ""
    return f"<section><div class=head><h2>What was recorded</h2></div><div class=pair>{figures}</div></section>"


def fault_table(runs: Sequence[RunSummary]) -> str:
    """Who did not answer or was refused, by method and reason, the most frequent first; empty without faults."""
    times: Counter[tuple[str, str]] = Counter()
    clients: dict[tuple[str, str], Counter[int]] = {}
    rounds: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        for number, client, reason in faults(run):
            key = (run.algorithm, reason)
            times[key] += 1
            clients.setdefault(key, Counter())[client] += 1
            rounds.setdefault(key, []).append(number)
    if not times:
        return ""
    lines = []
    for key, count in times.most_common(FAULT_LINES):
        often = ", ".join(f"{client} ({n}×)" if n > 1 else str(client) for client, n in clients[key].most_common(6))
        more = len(clients[key]) - 6
        first, last = min(rounds[key]), max(rounds[key])
        span = str(first) if first == last else f"{first} to {last}"
        lines.append(
            f'<tr data-method="{escape(key[0])}"><td>{escape(key[0])}</td><td>{escape(key[1])}</td><td>{count}</td>'
            f"<td>{often}{f' and {more} more' if more > 0 else ''}</td><td>{span}</td></tr>"
        )
    rest = len(times) - FAULT_LINES
    left = f"<p class=caption>{rest} more kinds of faults are not listed.</p>" if rest > 0 else ""
    heads = "".join(f"<th scope=col>{name}</th>" for name in ("Method", "What happened", "Times", "Clients", "Rounds"))
    return (
        "<section><div class=head><h2>Clients that dropped out or were refused</h2></div><div class=scroll>"
        f"<table class='words faults'><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        f"{left}</section>"
    )


def _accuracy(spread: Spread) -> str:
    deviation = f" ± {100 * spread.std:.1f}" if spread.count > 1 else ""
    return f"{100 * spread.mean:.1f}{deviation} %".replace(" ", NO_BREAK)


def _common(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of these tables say alike."""
    first, *others = tables
    found: dict[str, Any] = {}
    for key, value in first.items():
        values = [other.get(key) for other in others]
        if isinstance(value, Mapping):
            found[key] = _common([value, *(one for one in values if isinstance(one, Mapping))])
        elif all(one == value for one in values):
            found[key] = value
    return found


def _lead(configuration: Mapping[str, Any]) -> list[str]:
    """The task in a few words, from the keys that are there."""
    data = configuration.get("data")
    source = data if isinstance(data, Mapping) else configuration
    name = data.get("name") if isinstance(data, Mapping) else data
    found = [str(value) for value in (name, source.get("partition")) if value is not None]
    if (clients := source.get("clients")) is not None:
        found.append(f"{clients} clients")
    if isinstance(share := configuration.get("participation"), int | float):
        found.append(f"{percent(share)} % of them a round")
    if (model := configuration.get("model")) is not None:
        found.append(str(model))
    if (rounds := configuration.get("rounds")) is not None:
        found.append(f"{rounds} rounds")
    return [text.replace(" ", NO_BREAK) for text in found]


def _unfinished(runs: Sequence[RunSummary]) -> str:
    """A warning that names the runs with fewer rounds than they, or the others, should have."""
    told = [number for run in runs if isinstance(number := run.configuration.get("rounds"), int)]
    most = max([*told, *(len(run.records) for run in runs)])
    planned = [most if len(set(told)) < 2 else run.configuration.get("rounds", most) for run in runs]
    short = [
        f"{run.algorithm} (seed {run.seed}: {len(run.records)})"
        for run, rounds in zip(runs, planned, strict=True)
        if len(run.records) < rounds
    ]
    if not short:
        return ""
    named = ", ".join(short[:8]) + (f" and {len(short) - 8} more" if len(short) > 8 else "")
    whole = f"{most} rounds" if len(set(told)) < 2 else "all their rounds"
    return (
        f"<p class=warning>Not all runs have {whole}: {escape(named)}. "
        "Their figures below are of the rounds they have; a mean curve ends where its shortest run ends.</p>"
    )


def _facts(tables: Sequence[Mapping[str, Any]], without: set[str]) -> str:
    """Lines of a table: every key with its value, or its values where runs differ."""
    values: dict[str, list[str]] = {}
    for table in tables:
        for key, value in _flat(table):
            known = values.setdefault(key, [])
            if key not in without and value not in known:
                known.append(value)
    return "".join(
        f"<tr><th scope=row>{breakable(key)}</th><td>{escape(_listed(known))}</td></tr>"
        for key, known in values.items()
        if known
    )


def _listed(values: Sequence[str]) -> str:
    return "; ".join(values[:5]) + (f"; and {len(values) - 5} more" if len(values) > 5 else "")


def _flat(table: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested tables as dotted keys with values as text; what is not set is left out."""
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{key}.")
        elif isinstance(value, bool):
            found.append((f"{before}{key}", "yes" if value else "no"))
        elif isinstance(value, list | tuple):
            found.append((f"{before}{key}", ", ".join(map(str, value))))
        elif value is not None:
            found.append((f"{before}{key}", str(value)))
    return found


def _stroke(style: Style) -> str:
    """The method's line, as its curves are drawn."""
    dashes = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "10 4"}[style.dash]
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<svg width="22" height="8" aria-hidden="true"><path d="M1 4H21" stroke="{style.colour}" stroke-width="4"'
        f' fill="none"{dash}/></svg>'
    )
