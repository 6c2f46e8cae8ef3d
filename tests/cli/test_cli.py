"""Check the output, its stream and the exit code of the command line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

import fedloom
from fedloom.algorithm import algorithms
from fedloom.cli import LISTS, commands, main, paper_commands
from fedloom.cli.catalog import KINDS, cache_path
from fedloom.cli.predicting import FORMATS
from fedloom.data.dataset import datasets
from fedloom.data.partition import partitions
from fedloom.models import models
from fedloom.parts.families import FAMILIES
from fedloom.runs.events import Event, RunName
from fedloom.runs.progress import Display, Lines, display
from fedloom.study import cores
from forking_cli import Say, saying

JOB = """
algorithm = "fedavg"
algorithms = ["fedavg", "fedmr(unit=tensor)"]
seeds = [0, 1]
rounds = 3
participation = 0.5
evaluate_every = 1
targets = [0.5, 1.0]
model = "logistic"
threads = 1
workers = 1
[data]
clients = 4
partition = "iid"
[training]
learning_rate = 0.3
"""


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs a command in a folder with job.toml.

    `fed("run", "job.toml")` returns (exit code, stdout, stderr).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "job.toml").write_text(JOB)
    return saying(capsys)


def test_run_says_the_result_and_where_it_lies(fed: Say, tmp_path: Path) -> None:
    code, out, err = fed("run", "job.toml")
    assert code == 0, err
    assert re.search(
        r"^fedavg, seed 0: test accuracy \d+\.\d\d %, best \d+\.\d\d %$", out, re.MULTILINE
    )
    assert re.search(r"^3 rounds, [\d.]+ kB down, [\d.]+ kB up, [\d.]+ s$", out, re.MULTILINE)
    code, out_ditto, err = fed(
        "run", "job.toml", "name=own", "algorithm=ditto", "data.local_test=0.25"
    )
    assert code == 0, err
    assert re.search(
        r"^ditto.*: test accuracy \d+\.\d\d %, best \d+\.\d\d %, clients' own \d+\.\d\d %$",
        out_ditto,
        re.MULTILINE,
    )
    assert re.search(r" %, \d+\.\d % \(clients' own\) after 3 rounds", err)
    for name in ("model.safetensors", "report.html"):
        assert str(Path("runs/job/fedavg/seed-0") / name) in out
        assert (tmp_path / "runs/job/fedavg/seed-0" / name).exists()
    assert "after 3 rounds" in err


def test_verbose_says_what_share_of_a_matrix_product_training_reaches(fed: Say) -> None:
    code, out, _ = fed("run", "job.toml", "--verbose")
    assert code == 0
    assert re.search(
        r"^fastest round: \d+ clients trained in .+ s, [\d.,]+ GFLOP/s, \d+% of a large matrix "
        r"product here",
        out,
        re.M,
    )


def test_a_finished_run_is_not_run_again_unless_asked(fed: Say) -> None:
    finished = fed("run", "job.toml")
    repeated = fed("run", "job.toml")
    assert repeated[:2] == finished[:2]
    assert "finished before" in repeated[2]
    fresh = fed("run", "job.toml", "--fresh")
    assert "finished before" not in fresh[2]
    assert fresh[1].splitlines()[0] == finished[1].splitlines()[0]


def test_a_run_is_lengthened_by_the_same_command_with_more_rounds(fed: Say, tmp_path: Path) -> None:
    page = tmp_path / "runs/job/fedavg/seed-0/report.html"
    assert fed("run", "job.toml")[0] == 0
    shorter = page.read_text()
    code, out, err = fed("run", "job.toml", "rounds=5")
    assert code == 0, err
    assert err.splitlines()[0] == "fedavg, seed 0: going on from round 3 of 5"
    assert "5 rounds, " in out
    assert page.read_text() != shorter
    code, out, err = fed("run", "job.toml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (
        "has done 5 of 5 rounds, so that rounds must be more than 5, not 3: choose another name"
        in err
    )


def test_quiet_leaves_the_result_alone(fed: Say) -> None:
    code, out, err = fed("run", "job.toml", "--quiet", "algorithm=fedmr")
    assert (code, err) == (0, "")
    assert "test accuracy" in out


def test_compare_prints_a_table_and_says_where_the_report_is(fed: Say, tmp_path: Path) -> None:
    code, out, err = fed("compare", "job.toml")
    assert code == 0, err
    for word in (
        "Method",
        "Final",
        "Best",
        "50 %",
        "100 %",
        "down",
        "up",
        "Time",
        "over 2 seeds",
    ):
        assert word in out, word
    assert "fedavg" in out
    assert "fedmr(unit=tensor)" in out
    assert re.search(r"\d\d\.\d\d ± \d\.\d\d", out)
    assert " * " in out  # no method reaches 100 %
    assert max(map(len, out.splitlines())) <= 80
    assert out.splitlines()[-1] == f"look first at {Path('runs/job/report.html')}"
    assert "With 2 seeds the exact test cannot reach significance" in " ".join(out.split())
    assert (tmp_path / "runs/job/report.html").exists()
    repeated = fed("compare", "job.toml")
    assert repeated[1] == out
    assert repeated[2].count("finished before") == 4


def test_runs_go_side_by_side_without_being_told_with_the_same_results(
    fed: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 2)
    monkeypatch.setattr(cores, "_memory", lambda: 1 << 40)
    command = ("compare", "job.toml", "algorithms=[fedavg]", "seeds=[0, 1, 2]", "threads=none")
    code, out_parallel, err = fed(*command, "workers=auto", "directory=together")
    assert code == 0, err
    assert (
        err.splitlines()[0]
        == "up to 2 runs at a time, threads per run: 1 (workers=1: one after another)"
    )
    code, out_serial, err = fed(*command, "directory=apart")
    assert code == 0, err
    assert "at a time" not in err
    texts = out_parallel.replace("together", "apart"), out_serial
    words_parallel, words_serial = (re.sub(r"[\d.]+ s\b|─+", "", text).split() for text in texts)
    assert words_parallel == words_serial  # except for the times and their width
    for seed in range(3):
        parallel, serial = (
            tmp_path / folder / "fedavg" / f"seed-{seed}" for folder in ("together", "apart")
        )
        for name in ("metrics.jsonl", "model.safetensors"):
            assert (parallel / name).read_bytes() == (serial / name).read_bytes()


def test_the_directory_of_another_configuration_is_refused(fed: Say) -> None:
    assert fed("run", "job.toml")[0] == 0
    code, _, err = fed("run", "job.toml", "training.learning_rate=0.2")
    assert code == 2
    assert "runs/job/fedavg/seed-0 holds a run with training.learning_rate = 0.3, not 0.2" in err
    assert err.count("\n") == 1
    # these settings change no figure
    assert fed("run", "job.toml", "targets=[0.9]", "checkpoint_every=2")[0] == 0
    assert fed("run", "job.toml", "training.learning_rate=0.2", "--fresh")[0] == 0


def test_a_run_that_diverges_is_exit_code_1_and_one_line(fed: Say) -> None:
    code, out, err = fed("run", "job.toml", "--quiet", "training.learning_rate=1e38")
    assert code == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "diverged" in err


def test_a_comparison_with_a_failure_shows_the_others_and_is_exit_code_1(fed: Say) -> None:
    code, out, err = fed(
        "compare",
        "job.toml",
        "algorithms=[fedavg, fedavgm(learning_rate=1e38)]",
        "rounds=5",
        "seeds=[0]",
    )
    assert code == 1
    assert "fedavg" in out
    assert (
        "1 of 2 runs failed, the first (fedavgm(learning_rate=1e+38), seed 0)"
        in err.splitlines()[-1]
    )


@pytest.mark.parametrize(
    ("command", "registry"),
    [
        ("algorithms", algorithms),
        ("models", models),
        ("datasets", datasets),
        ("partitions", partitions),
    ],
)
def test_lists_name_everything_with_its_parameters(
    fed: Say, command: str, registry: object
) -> None:
    code, out, _ = fed("list", command)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    for entry in registry:  # type: ignore[attr-defined]
        if not entry.make.__module__.startswith("fedloom."):
            continue  # another test registered it in this process
        assert re.search(rf"^  {re.escape(entry.name)} ", out, re.MULTILINE), entry.name
        assert entry.summary.split()[0] in words
        code, listing, _ = fed("list", command, entry.name)
        assert code == 0
        assert listing.startswith(f"{entry.name}(")
        assert (
            all(name in listing.splitlines()[0] for name in entry.parameters)
            or entry.name == "stages"
        )


def test_one_method_is_described_in_full(fed: Say) -> None:
    code, out, _ = fed("list", "fedmr")
    assert code == 0
    assert out.startswith("fedmr(unit=layer, fraction=1.0")
    assert "Lemma 4.4" in out


def test_version_and_help_are_printed_and_no_command_is_bad_input(fed: Say) -> None:
    assert fed("--version") == (0, f"fedloom {fedloom.__version__}\n", "")
    code, out, _ = fed("--help")
    assert code == 0
    assert "compare" in out
    code, _, err = fed()
    assert code == 2
    assert "Train:" in err


def test_methods_are_listed_by_family(fed: Say) -> None:
    _, out, _ = fed("list", "algorithms")
    lines = out.splitlines()
    heads = [lines.index(title.ljust(80)) for title in FAMILIES.values()]
    assert heads == sorted(heads)
    assert len(lines) < 2 * len(list(algorithms)) + 20
    listed = {
        family: re.findall(r"^  (\w+) ", "\n".join(lines[start:end]), re.MULTILINE)
        for family, start, end in zip(FAMILIES, heads, [*heads[1:], len(lines)], strict=True)
    }
    assert listed["recombination"] == [
        "fedcross",
        "fedkdmr",
        "fedmr",
        "fedmr_async",
        "fedmut",
        "indep",
    ]
    assert listed["composing"] == [
        "ala",
        "ala_code",
        "clustered",
        "dp_sgd",
        "ema",
        "fedasync",
        "fedbuff",
        "feddecorr",
        "fedlc",
        "fedntd",
        "fisher_merge",
        "gossip",
        "last",
        "local_private",
        "longest_idle",
        "lowrank",
        "norm_bound",
        "partial_work",
        "power_of_choice",
        "private",
        "quantised",
        "robust",
        "secure",
        "sign_flip",
        "sparse",
        "stages",
        "umf",
    ]
    assert {"fedala", "fedrep", "ditto"} <= set(listed["personal"])
    assert {"fedavg", "scaffold", "clusamp"} <= set(listed["global"])


COMMANDS = [
    (),
    *((name,) for members in commands.values() for name in members),
    *(("paper", name) for name in paper_commands),
    ("paper",),
    ("flower",),
    ("flower", "keys"),
    ("flower", "init"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_whole_and_plain(fed: Say, command: tuple[str, ...]) -> None:
    code, out, _ = fed(*command, "--help")
    assert code == 0
    assert "\\" not in out
    assert "[default" not in out
    assert max(map(len, out.splitlines())) <= 80
    listing = out.partition("Train:" if not command else "Commands:")[2]
    assert not re.search(
        r"(?<!\])\.\.\.$", listing, re.MULTILINE
    )  # click cuts long texts; here only repeated arguments end so
    for members in commands.values() if not command else ():
        for subcommand in members.values():
            assert (subcommand.__doc__ or "").split("\n")[0] in " ".join(listing.split())


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unknown_option_points_to_the_help_of_its_command(
    fed: Say, command: tuple[str, ...]
) -> None:
    code, out, err = fed(*command, "--frobnicate")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"(see {' '.join(('fedloom', *command))} --help)" in err


def test_it_is_a_module_too() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "fedloom", "--version"], capture_output=True, text=True, check=True
    )
    assert completed.stdout == f"fedloom {fedloom.__version__}\n"


def test_without_a_terminal_progress_is_a_line_now_and_then() -> None:
    seconds, text = 0.0, io.StringIO()
    lines = Lines(Console(file=text, width=60), runs=1, rounds=10, clock=lambda: seconds)
    name = RunName("fedmr(unit=segment, fraction=0.5)", 0)
    lines(Event("started", name, 4))
    for finished in range(5, 9):
        seconds += 6
        lines(Event("round", name, finished, {"round": finished, "accuracy": 0.5}, 6.0))
    assert text.getvalue().splitlines() == [
        f"{name}: going on from round 4 of 10",
        f"{name}: round 6 of 10, accuracy 50.0 %; about 24 s left",
        f"{name}: round 8 of 10, accuracy 50.0 %; about 12 s left",
    ]


def test_without_a_terminal_runs_at_the_same_time_each_have_their_lines_and_all_of_them_one() -> (
    None
):
    seconds, text = 0.0, io.StringIO()
    quick, slow, late = RunName("fedavg", 0), RunName("fedmr", 0, "rounds=40"), RunName("fedala", 0)
    lines = Lines(Console(file=text, width=60), runs=4, rounds={quick: 20, slow: 40, late: 20, RunName("x", 0): 5},
                  clock=lambda: seconds)  # fmt: skip

    def tell(*events: Event) -> list[str]:
        text.seek(0)
        text.truncate()
        for event in events:
            lines(event)
        return text.getvalue().splitlines()

    tell(Event("skipped", RunName("x", 0), 5), Event("started", quick), Event("started", slow))
    for number in range(1, 5):  # two rounds of one run take as long as one of the other
        seconds += 2
        assert tell(Event("round", quick, number, {"accuracy": 0.25} if number == 2 else {})) == []
        assert number % 2 or tell(Event("round", slow, number // 2)) == []
    seconds += 2
    assert tell(Event("round", quick, 5)) == [
        # 80 - 7 rounds remain. 6 rounds took the 8 s since the first: 98 s. But the slow run needs
        # 4 s a round.
        "1 of 4 runs finished; about 2 min 32 s left for all",
        "  fedavg, seed 0: round 5 of 20, accuracy 25.0 %",
        "  fedmr, seed 0, rounds=40: round 2 of 40, not measured yet",
    ]
    seconds += 1
    assert tell(Event("round", slow, 3)) == []  # no line for each round
    assert tell(Event("ended", quick, 20, {"accuracy": 0.5}, 12.0)) == [
        "fedavg, seed 0: accuracy 50.0 % after 20 rounds, 12 s"
    ]
    tell(Event("started", late))
    seconds += 9
    spoken = tell(Event("round", slow, 4, {"personal_accuracy": 0.875}))
    assert re.fullmatch(r"2 of 4 runs finished; about .* left for all", spoken[0])
    assert spoken[1:] == [
        "  fedmr, seed 0, rounds=40: round 4 of 40, accuracy 87.5 % (clients' own)",
        "  fedala, seed 0: round 0 of 20, not measured yet",
    ]
    assert "failed: diverged" in tell(Event("failed", slow, text="diverged"))[0]
    assert tell(Event("ended", late, 20, {"accuracy": 0.25, "personal_accuracy": 0.75}, 60.0)) == [
        "fedala, seed 0: accuracy 25.0 %, 75.0 % (clients' own) after 20 rounds, 1 min 00 s"
    ]


def test_on_a_terminal_progress_is_bars() -> None:
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True, highlight=False)
    fedavg, fedmr = RunName("fedavg", 0), RunName("fedmr[x]", 0)
    with display(console, runs=2, rounds=4) as shown:
        assert type(shown) is Display
        shown(Event("skipped", fedavg, 4))
        shown(Event("started", fedmr))
        shown(Event("round", fedmr, 1, {"round": 1, "accuracy": 0.25}, 1.0))
        shown.progress.refresh()
        assert "5/8" in text.getvalue()
        assert "1/4" in text.getvalue()
        assert "25.0 %" in text.getvalue()
        assert "seed 0: fedmr[x]" in text.getvalue()
        shown(Event("ended", fedmr, 4, {"round": 4, "accuracy": 0.75}, 4.0))
    assert "fedmr[x], seed 0: accuracy 75.0 % after 4 rounds" in text.getvalue()


def test_the_schema_knows_the_examples_and_marks_mistakes(fed: Say, tmp_path: Path) -> None:
    validator = pytest.importorskip("jsonschema", reason="needs jsonschema").Draft202012Validator
    job = tmp_path / "job.toml"
    content = job.read_text()
    code, out, _ = fed("schema", "job.toml")
    assert (code, out) == (0, "fedloom.schema.json: named by the first line of job.toml\n")
    assert job.read_text() == f"#:schema fedloom.schema.json\n{content}"
    assert fed("schema", "job.toml")[0] == 0
    assert job.read_text().count("#:schema") == 1
    assert fed("run", "job.toml", "algorithm=fedavg", "-q")[0] == 0
    schema = json.loads((tmp_path / "fedloom.schema.json").read_text())
    assert json.loads(fed("schema")[1]) == schema
    check = validator(schema)
    examples = Path(__file__).parents[2] / "examples"
    for path in examples.glob("*.toml"):
        assert list(check.iter_errors(tomllib.loads(path.read_text()))) == [], path
    for wrong in (
        {"rouns": 3},
        {"participation": 2},
        {"data": {"clients": -1}},
        {"measure": "worst"},
        {"seeds": ["a"]},
    ):
        assert list(check.iter_errors(wrong)), wrong
    assert not list(check.iter_errors({"evaluate_every": "none", "data": {"local_test": 0.25}}))
    assert "fedmr" in schema["properties"]["algorithm"]["examples"]


def test_the_examples_name_a_schema_that_lies_beside_them(fed: Say) -> None:
    # Remove the names of methods and models; only editors use them as suggestions.
    def keys(value: object) -> object:
        if isinstance(value, dict):
            return {key: keys(item) for key, item in value.items() if key != "examples"}
        return value

    examples = Path(__file__).parents[2] / "examples"
    for path in examples.glob("*.toml"):
        directive, _, name = path.read_text().splitlines()[0].partition(" ")
        assert directive == "#:schema", path
        written = json.loads(path.with_name(name).read_text())
        assert keys(written) == keys(json.loads(fed("schema")[1])), (
            f"to mend: fedloom schema examples/{path.name}"
        )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedloom re", {"report"}),
        ("fedloom paper re", {"replay", "reproduce", "referee"}),
        ("fedloom list fedmr_a", {"fedmr_async"}),
        ("fedloom run a.toml algorithm=fedmr", {"algorithm=fedmr", "algorithm=fedmr_async"}),
        ("fedloom run a.toml data.part", {"data.partition="}),
        ("fedloom export runs --to s", {"safetensors"}),
    ],
)
def test_a_shell_can_complete_commands_and_names(words: str, expected: set[str]) -> None:
    main(["list", "fedmr"])  # names come from the cache
    environment = {
        **os.environ,
        "_FEDLOOM_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fedloom"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == expected


def test_names_are_found_however_they_are_written(fed: Say) -> None:
    expected = fed("list", "algorithms", "fedala")
    assert expected[0] == 0
    assert fed("list", "FedALA") == expected
    assert fed("list", "algorithm", "FEDALA") == expected
    assert fed("list", "LG-FedAvg")[1].startswith("lg_fedavg(")
    _, out, _ = fed("list")
    assert [line.split()[0] for line in out.splitlines()[: len(KINDS)]] == list(KINDS)
    _, out, _ = fed("list", "parts")
    assert "Aggregation (server)" in out
    assert "auto" not in fed("list", "engines")[1].split()


def test_the_cache_of_names_is_made_again_for_other_files(
    fed: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDLOOM_CACHE", str(folder))
    expected = fed("list", "models")
    (path,) = folder.iterdir()
    assert path == cache_path()
    assert fed("list", "models") == expected
    path.write_text("{}")  # damaged
    assert fed("list", "models") == expected
    assert json.loads(path.read_text()).keys() == KINDS.keys()
    path.rename(folder / "catalog-older.json")
    assert fed("list", "models") == expected
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("kind", LISTS)
def test_earlier_names_of_lists_work_with_a_notice(fed: Say, kind: str) -> None:
    code, out, err = fed(kind)
    assert (code, out) == fed("list", kind)[:2]
    assert err == (
        f"fedloom: fedloom {kind} is now fedloom list {kind}; the next version removes the old "
        "name\n"
    )


def test_earlier_names_of_commands_of_papers_work_with_a_notice(fed: Say) -> None:
    code, out, err = fed("reproduce")
    assert (code, out) == fed("paper", "reproduce")[:2]
    assert err.startswith("fedloom: fedloom reproduce is now fedloom paper reproduce; ")


def test_formats_of_exports_are_completed() -> None:
    from fedloom.serving.exporting import SUFFIXES

    assert set(FORMATS) == set(SUFFIXES)
