"""Input that nobody means well with: every way in answers in one line, soon, and in bounded memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedloom.algorithm import algorithms
from fedloom.cli import main
from fedloom.config.expression import Call, show
from fedloom.data.dataset import datasets
from fedloom.data.noise import label_noises
from fedloom.data.partition import partitions
from fedloom.engines.base import engines
from fedloom.errors import LONGEST_QUOTED, FedloomError, InvalidValue, quoted
from fedloom.experiment.configuration import LONGEST_FILE, configuration, put, read_table
from fedloom.experiment.trackers.tracker import trackers
from fedloom.models import models
from fedloom.recording.recorder import recorders

HEX = "0x" + "f" * 50_000  # which Python reads, but does not write in decimal figures
LONG = "y " * 49_999 + "yy"


def require_one_short_line(text: str) -> None:
    """One printable line, in which nobody's value stands in full when it is long."""
    assert text.isprintable()
    assert not re.search(r"(\S)\1{300}|(y ){150}", text)
    assert len(text) < 2100


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rounds=" + "9" * 5000, "rounds must be a whole number, not '999"),
        ("rounds=" + "9" * 4000, "rounds must be a number between -3.4e+38 and 3.4e+38, not 999"),
        ("rounds=" + "9" * 30, "rounds must be between 1 and 9.22337e+18, not 999"),
        ("training.learning_rate=" + "9" * 400, "training.learning_rate must be a number between"),
        ("training.learning_rate=1e400", "training.learning_rate must be greater than 0 and at most 3.4e+38, not inf"),
        (f"rounds={HEX}", "rounds must be a number between -3.4e+38 and 3.4e+38, not a value of type int that is too long"),
        (f"seed={HEX}", "seed must be a number between"),
        (f"settings.rounds=[{HEX}]", "settings.rounds must be a number between"),
        (f"training.optimizer_options={{betas=[{HEX}]}}", "training.optimizer_options must be a number between"),
        ("algorithm=fedprox(mu=" + "9" * 400 + ")", "mu must be a number between"),
        ("rounds=" + "[" * 3000, "rounds must be a whole number, not '[[["),
        ("rounds=" + "[" * 60 + "]" * 60, "rounds nests more than 50 levels deep"),
        (".".join(["a"] * 3000) + "=1", "nests more than 50 levels deep"),
        ("algorithm=" + "umf(" * 3000, "nests more than 50 levels deep"),
        ("algorithm=a" + ":a" * 3000, "nests more than 50 levels deep"),
        ("name=" + "x" * 201, "at most 200 characters"),
        ("directory=" + "x" * 256, "directory must be a path of names of at most 255 bytes"),
        ("directory=a\udcffb", "directory must be text without halves of characters, not 'a\\udcffb'"),
        ("threads=1000000000", "threads must be between 1 and"),
        ("workers=100000", "workers must be at most"),
        ("engine=processes(workers=100000)", "not 100000: each takes about 0.2 GB of memory"),
        ("algorithm=secure(fedmr, repeats=1000000)", "not 1000000: in each, every client sends and receives about one model"),
        (
            "settings={participation={from=0.1,to=0.5,steps=10000},dropout=[0,0.1]}",
            "10000 x 2 values have 20,000 combinations: at most 10,000 are allowed",
        ),
        *((f"{key}={LONG}", "100,000 characters") for key in ("algorithm", "model", "engine", "device", "pool", "rounds")),
        *((f"data.{key}={LONG}", "100,000 characters") for key in ("name", "partition", "label_noise", "clients")),
        *((f"{key}={LONG}", "") for key in ("directory", "training.optimizer", "training.optimizer_options.x", "against")),
        (f"algorithms=['{LONG}']", "100,000 characters"),
        (f"trackers=['{LONG}']", "100,000 characters"),
        (f"plugins=['{LONG}']", "cannot import"),
        (f"model='{LONG}:x'", "cannot import"),
        (f"algorithm=fedmr(unit='{LONG}')", "100,000 characters"),
        ("algorithm=fedmr(" + "q" * 100_000 + "=1)", "100,000 characters"),
        (LONG, "is not key=value"),
        ("k" * 100_000 + "=1", "unknown key 'kkk"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_told_in_one_short_line(
    override: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('algorithm = "fedavg"\nrounds = 1\n')
    assert main(["run", "job.toml", override]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    require_one_short_line(line)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"rounds = " + b"9" * 5000, "is not a TOML file"),
        (b"rounds = " + b"9" * 4000, "rounds must be a number between"),
        (b"rounds = " + HEX.encode(), "must be a number between"),
        (b"rounds = " + b"[" * 3000, "nests more than 50 levels deep"),
        (b"rounds = " + b"[" * 60 + b"]" * 60, "nests more than 50 levels deep"),
        (b"a." * 3000 + b"a = 1", "nests more than 50 levels deep"),
        (b"#" * (LONGEST_FILE + 1), "is longer than 4,194,304 bytes"),
        (b'"' + b"k" * 100_000, "is not a TOML file"),
        (b"\xff", "not text in UTF-8"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_makes_no_sense_is_told_in_one_short_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(content)
    with pytest.raises(InvalidValue, match=re.escape(said)) as caught:
        read_table(tmp_path / "job.toml")
    require_one_short_line(str(caught.value))


def test_an_endless_file_is_no_configuration() -> None:
    with pytest.raises(InvalidValue, match="is longer than"):
        read_table(Path("/dev/zero"))


@given(st.text(max_size=500) | st.integers() | st.lists(st.text()))
def test_a_value_is_quoted_in_short(value: Any) -> None:
    text = quoted(value)
    assert text.isprintable()
    assert text == repr(value) or "characters)" in text
    assert len(text) <= 10 * LONGEST_QUOTED + 30  # \U0010ffff for a character


# --- anything at all ---

_NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 10**30, 10**400, 2**63, 1e300, 1e-320, 0.5])
_WORDS = st.text(max_size=5) | st.sampled_from(
    ["none", "auto", "a/b", "ray://", "cuda:99999999999", "os:getcwd", "no.such:thing", "\0", "\ud800", "'", "[", 300 * "y"]
)  # fmt: skip
_PLAIN = st.none() | st.booleans() | _NUMBERS | _WORDS
_VALUES = st.recursive(
    _PLAIN, lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_WORDS, inside, max_size=2), max_leaves=5
)
_REGISTRIES = (algorithms, datasets, partitions, models, recorders, trackers, engines, label_noises)


@st.composite
def _expressions(draw: st.DrawFn) -> str:
    """A name that is registered, with options that it has, which are anything."""
    entry = draw(st.sampled_from([entry for registry in _REGISTRIES for entry in registry]))
    names = draw(st.lists(st.sampled_from(list(entry.parameters)), max_size=3, unique=True)) if entry.parameters else []
    first = draw(st.sampled_from([(), (Call("fedavg"),), (Call("umf", (Call("fedmr"),)),), (0.1,), ([1, 2],), ("x",)]))
    until = draw(st.sampled_from([None, None, 2, "auto"]))
    named = {name: draw(_NUMBERS | _PLAIN | st.lists(_PLAIN, max_size=3)) for name in names}
    return str(Call(entry.name, first, named, until))


_KEYS = st.sampled_from(
    ["algorithm", "algorithms", "rounds", "participation", "seed", "seeds", "name", "model", "engine", "device", "threads",
     "workers", "pool", "record", "trackers", "targets", "last", "evaluate_every", "personal_every", "directory", "settings",
     "settings.rounds", "data", "data.name", "data.clients", "data.partition", "data.label_noise", "data.local_test", "training",
     "training.epochs", "training.learning_rate", "training.optimizer", "training.optimizer_options", "training.batch_size"]
)  # fmt: skip


@settings(deadline=10_000, max_examples=200, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(_KEYS | _WORDS, _VALUES | _expressions() | st.lists(_expressions(), max_size=2), max_size=3),
    st.booleans(),
)
def test_any_configuration_is_read_or_refused_in_one_short_line(given: dict[str, Any], typed: bool) -> None:
    table: dict[str, Any] = {}
    try:
        for key, value in given.items():
            if typed:
                put(table, f"{key}={value if isinstance(value, str) else show(value)}")
            else:
                *above, last = key.split(".")
                inner = table.setdefault(above[0], {}) if above else table
                if isinstance(inner, dict):
                    inner[last] = value
        found = configuration(table)
        for method in found.methods:
            found.resolved(method, found.seed)
    except FedloomError as error:
        require_one_short_line(str(error))
