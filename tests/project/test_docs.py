"""The documentation builds without warnings or network, matches the code, and its examples run."""

from __future__ import annotations

import html
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints
from xml.etree import ElementTree

import pytest
import typer.main
import yaml

from fedloom.algorithm import Algorithm, Facts, algorithms, name_of
from fedloom.algorithms.fedprox import FedProx
from fedloom.cli import app, main
from fedloom.common.registry import RegistryEntry
from fedloom.engines.choose import require_engine_on
from fedloom.models import models
from fedloom.parts.building import build
from fedloom.parts.combining import combinations
from fedloom.parts.hooks import HOOKS, Part
from fedloom.runs.config_file import KEYS, load
from forking_scripts import Scripts

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "generate"))

pages = __import__("pages")
lengths = __import__("lengths")

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def shipped() -> list[RegistryEntry]:
    """Return the methods of fedloom without the methods that other tests register."""
    return [entry for entry in algorithms if entry.make.__module__.startswith("fedloom.")]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def output(scripts: Scripts, code: str, folder: Path) -> str:
    """Return the output of a program; fail if it ends with an error."""
    program = folder / "page.py"
    program.write_text(code)
    return scripts.run(program, folder, folder / "output")


def programs() -> list[str]:
    """Return the pages with runnable Python; code of other projects is marked `py`."""
    names = (str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    return sorted(name for name in names if blocks(name, "python"))


def promised(page: str) -> str:
    """Return the output that a page shows directly below its Python."""
    text = (DOCS / page).read_text()
    return "".join(
        re.findall(r"^```python\n(?:(?!```)[^\n]*\n)*```\n\n```text\n(.*?)^```$", text, re.M | re.S)
    )


@pytest.mark.parametrize("page", programs())
def test_the_code_on_a_page_prints_what_the_page_shows(
    page: str, scripts: Scripts, tmp_path: Path
) -> None:
    code, shown = "\n".join(blocks(page, "python")), promised(page)
    text = output(scripts, code, tmp_path)
    if not shown:
        assert bool(text) == ("print(" in code)
        return
    assert NUMBER.sub("#", text) == NUMBER.sub("#", shown)
    printed, numbers = (
        [float(number) for number in NUMBER.findall(words)] for words in (text, shown)
    )
    assert len(numbers) >= 3
    # Other versions of PyTorch round differently and may predict a few of 364 images differently.
    assert printed == pytest.approx(numbers, abs=0.04)


def test_the_pages_with_programs_are_these() -> None:
    assert {"index.md", "data.md", "own-method.md", "secure.md", "coming-from.md"} < {*programs()}
    assert [page for page in ("data.md", "own-method.md") if not promised(page)] == []


COMPARED = """
import warnings; warnings.simplefilter("ignore")
import fedloom as fl
training = fl.Training(learning_rate=0.1, epochs=1, batch_size=50)
task = fl.make_task("digits", clients=4, partition="dirichlet(0.3)", model="mlp(hidden=[8])", training=training)
for around in ("{}", "umf({})", "ala({}, max_epochs=3)"):
    model = fl.run(around.format("half_step(step=1.0, mu=0.5)"), task, rounds=3, participation=0.5).model
    expected = fl.run(around.format("fedprox(mu=0.5)"), task, rounds=3, participation=0.5).model
    for tensor, expected_tensor in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(tensor, expected_tensor)
    print(around, "as FedProx")
"""


def test_the_proximal_term_on_the_page_about_methods_is_that_of_fedprox_inside_parts_too(
    scripts: Scripts, tmp_path: Path
) -> None:
    """The page's method with a full server step equals FedProx, also inside parts.

    The proximal term of FedProx is centred on the model of the server.
    """
    (block,) = (block for block in blocks("own-method.md", "python") if '("half_step")' in block)
    text = output(scripts, block.split("\n\n\ntask = ")[0] + COMPARED, tmp_path)
    assert text.endswith("{} as FedProx\numf({}) as FedProx\nala({}, max_epochs=3) as FedProx\n")


def test_every_test_that_the_page_about_secure_recombination_names_exists() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(
        re.findall(r"`(test_[a-z_]+[a-z])[_.]*(?:\[[a-z ]+\])?`", (DOCS / "secure.md").read_text())
    )
    assert len(named) > 20
    assert not [name for name in named if f"def {name}" not in tests]


TABLES = [
    pytest.param(page, number, id=f"{page}-{number}")
    for page in sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    for number, table in enumerate(blocks(page, "toml"))
    if "my_" not in table and "module:" not in table and "'base'" not in table
]


@pytest.mark.parametrize(("page", "number"), TABLES)
def test_a_table_on_a_page_is_a_configuration(page: str, number: int, tmp_path: Path) -> None:
    table = blocks(page, "toml")[number]
    (tmp_path / "job.toml").write_text(table)
    loaded = load(tmp_path / "job.toml", [] if "algorithm" in table else ["algorithm=fedavg"])
    assert all(str(loaded.method(text)) for text in loaded.algorithms)
    if (page, number) == ("index.md", 0):
        assert len(loaded.algorithms) * len(loaded.seeds) == 6
    if page == "coming-from.md":
        assert loaded.algorithm == "fedprox(mu=0.1)"


def commands() -> list[tuple[str, list[str]]]:
    """Return the fedloom commands in README.md and all pages, with their page."""
    found = []
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = path.read_text().replace("\\\n", " ")
        shells = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S))
        lines = re.findall(r"^(fedloom .+)$", shells, re.M)
        lines += re.findall(r"^ {4}(fedloom .+)$", text, re.M)
        lines += re.findall(r"`(fedloom [a-z]+ [^`]+)`", text)
        found += [(path.name, shlex.split(" ".join(line.split()), comments=True)) for line in lines]
    return found


def test_every_command_on_a_page_exists_with_its_options() -> None:
    listed = commands()
    assert len(listed) > 60
    wrong = []
    for page, (_, *words) in listed:
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            name = words.pop(0)
            if name.startswith("--"):
                break
            command = command.commands.get(name)
        options = {
            option for parameter in getattr(command, "params", ()) for option in parameter.opts
        }
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        if command is None or given - options - {"--help"}:
            wrong.append((page, words))
    assert wrong == []


GENERATED = {"results.md", "trials.md", "contributing.md"}


def test_every_page_begins_with_an_example() -> None:
    pages_of_text = [path for path in DOCS.rglob("*.md") if path.name not in GENERATED]
    assert len(pages_of_text) + len(GENERATED) <= 25
    begin = {path.name: path.read_text().split("\n## ")[0] for path in pages_of_text}
    late = {"own-method.md"}  # the code is in a later section
    assert {name for name, text in begin.items() if "\n```" not in text} == late


def test_every_key_of_a_configuration_is_explained() -> None:
    text = (DOCS / "configuration.md").read_text()
    missing = [
        key
        for key in KEYS
        if key not in ("data", "training", "clock", "stop")
        and f"`{key.rpartition('.')[2]}`" not in text
    ]
    assert missing == []


def test_every_command_is_listed() -> None:
    text = (DOCS / "cli.md").read_text()
    missing = [
        name
        for name in typer.main.get_command(app).commands
        if not re.search(rf"fedloom.*\b{name}\b", text)
    ]  # type: ignore[attr-defined]
    assert missing == []


def test_every_method_says_when_to_use_it_and_where_it_comes_from() -> None:
    for entry in shipped():
        doc = pages.Doc(entry)
        assert doc.when.startswith("Use it "), entry.name
        assert doc.when.endswith("."), entry.name
        assert "Use it" not in " ".join(doc.paragraphs), entry.name
        if entry.name != "clusamp":
            assert doc.source, entry.name


def test_every_method_is_found_by_the_title_of_its_paper() -> None:
    assert {*pages.PAPERS} == {entry.name for entry in shipped()}
    described = pages.described(algorithms["fedprox"])
    assert "“Federated Optimization in Heterogeneous Networks”" in described


def test_long_signatures_have_a_parameter_per_line() -> None:
    texts = [
        pages.described(entry).partition("```text\n")[2].partition("\n```")[0]
        for entry in shipped()
    ]
    assert any(re.match(r"fedprox\(mu=0\.01\b[^\n]*\)$", text) for text in texts)
    assert any(re.match(r"fedala\(\n(?:    \w+=.+,\n)+\)$", text) for text in texts)
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80


def test_every_parameter_is_described() -> None:
    entries = [*shipped(), *(entry for registry in pages.REGISTRIES.values() for entry in registry)]
    for entry in (entry for entry in entries if entry.make.__module__.startswith("fedloom.")):
        rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", pages.described(entry), re.M)
        assert [name for name, text in rows if not text] == [], entry.name


def test_every_method_is_on_one_page_with_all_its_parameters() -> None:
    listed = [entry.name for family in pages.FAMILIES for entry in pages.family(family)]
    assert {entry.name for entry in shipped()} <= {*listed}
    for entry in shipped():
        text = pages.described(entry)
        if not getattr(entry.make, "variadic", False):
            assert re.findall(r"^\| `(\w+)` \|", text, re.M) == list(entry.parameters), entry.name
        assert f"{{#{entry.name}}}" in text
    assert {name: pages.family_of(algorithms[name]) for name in ("fedprox", "fedmr", "fedala", "ditto", "ala")} == {
        "fedprox": "global", "fedmr": "recombination", "fedala": "personal", "ditto": "personal", "ala": "composing",
    }  # fmt: skip


def readable(markup: str) -> str:
    """Return formulas in [[double brackets]] with `_{}` and `^{}` for indices and exponents."""
    text = re.sub(
        r"<msubsup>(<m.>.*?</m.>)(<m.>.*?</m.>)(<m.>.*?</m.>)</msubsup>", r"\1_{\2}^{\3}", markup
    )
    for tag, sign in (("msub", "_"), ("msup", "^")):
        for _ in range(3):  # from the inside out
            script = rf"((?:(?!<{tag}>).)*)(<(m\w+)>(?:(?!<{tag}>).)*?</\3>)"
            text = re.sub(rf"<{tag}>{script}</{tag}>", rf"\1{sign}{{\2}}", text)
    text = text.replace("<mo>&#8290;</mo>", " ").replace("<math>", "[[").replace("</math>", "]]")
    return html.unescape(re.sub(r"</?m\w+>", "", text))


@pytest.mark.parametrize(
    ("plain", "shown"),
    [
        ("w <- w_t - eta * sum_i g_i^2", "[[w←w_{t}−η·∑_{i} g_{i}^{2}]]"),
        ("`alpha_i <- 1` and alpha_i", "`alpha_i <- 1` and [[α_{i}]]"),
        ("||w_i - w_j||^2 >= 0", "[[‖w_{i}−w_{j}‖^{2}≥0]]"),
        ("new pool[k, u] * 2", "new [[pool[k,u]·2]]"),
        ("minimise L + <w, h_i>", "minimise [[L+⟨w,h_{i}⟩]]"),
        ("decay^(t - 1), once-only well-known", "[[decay^{t−1}]], once-only well-known"),
        ("the sum of the two, metadata, a < b", "the sum of the two, metadata, [[a<b]]"),
        ("a client of `power` (`other`), a step", "a client of `power` (`other`), a step"),
        ("(1 + tau)^-`power` of eta_{t-1}", "[[(1+τ)^{−<code>power</code>}]] of [[η_{t−1}]]"),
        (
            "momentum 0 is mu, the mean of w_t, x_1 to x_K",
            "momentum 0 is μ, the mean of [[w_{t}]], [[x_{1}]] to [[x_{K}]]",
        ),
        ("d = grad l(w'; b2), unclosed (w_t", "[[d=∇ l(w';b_{2})]], unclosed ([[w_{t}]]"),
    ],
)
def test_formulae_are_set(plain: str, shown: str) -> None:
    assert readable(pages.typeset(plain)) == shown


def test_every_formula_is_well_formed() -> None:
    for entry in shipped():
        for formula in re.findall(r"<math>.*?</math>", pages.described(entry)):
            ElementTree.fromstring(formula)
            assert "<-" not in html.unescape(formula), formula


def test_names_of_parameters_stay_as_they_are() -> None:
    assert readable(pages.typeset("q - relation_rate q_i", ["relation_rate", "q"])) == (
        "[[q−<code>relation_rate</code> q_{i}]]"
    )


def test_types_are_said_in_words() -> None:
    described = pages.described(algorithms["fedmr"])
    assert "| `unit` | `layer` | `layer` or `tensor` or `segment` |" in described
    assert "| `local` | `none` | a method or none |" in described
    assert pages.kind(int | None) == "a whole number or none"
    assert "| `hidden` |" in pages.described(models["mlp"])
    assert pages.kind(get_type_hints(FedProx, include_extras=True)["mu"]) == "a number ≥ 0"


def test_the_args_of_a_docstring_describe_the_parameters() -> None:
    def train(*, epochs: int = 1, rate: float = 0.1) -> None:
        """Train a model.

        Use it often.

        Args:
            epochs: Passes over the data,
                at least one.
            rate: Step size.

        Raises:
            ValueError: If it fails.
        """

    entry: RegistryEntry[Any] = RegistryEntry("train", train)
    assert entry.text == "Train a model.\n\nUse it often."
    assert entry.arguments == {
        "epochs": "Passes over the data, at least one.",
        "rate": "Step size.",
    }
    assert "| `rate` | `0.1` | a number | Step size. |" in pages.described(entry)


COUNTED = '''"""A file."""
import math

RATE = 0.1  # counts, since the class names it
OTHER = 2


class Base:
    """Counts."""

    def start(self):
        return RATE


@methods.register("whole")
class Whole(Base):
    """Of two
    lines."""

    size: int = 1

    def train(self):
        """Train."""
        # on what is there
        text = """not a
        docstring"""
        return helper(text)


@methods.register("another")
class Another(Whole):
    pass


def helper(text):

    return math.inf
'''


def test_lines_of_code_are_those_of_a_class_and_of_what_it_uses_in_its_file() -> None:
    assert lengths.code_lines(COUNTED, "Whole") == 1 + 3 + 7 + 2  # RATE, Base, Whole and helper
    assert lengths.code_lines(COUNTED, "Another") == 3


def test_every_method_has_a_row_with_its_lines_of_code() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)`\].* \| (\d+) \| (.+) \|$", pages.on_page_markdown("[[lengths]]"), re.M
    )
    assert {entry.name for entry in shipped()} <= {name for name, _, _ in rows}
    for name, count, source in rows:
        file = Path(inspect.getfile(algorithms[name].make))
        assert 0 < int(count) < len(file.read_text().splitlines()), name
        assert source


def test_the_table_of_moments_has_every_part_in_every_hook_in_which_it_can_act() -> None:
    rows = re.findall(
        r"^\| .+? \| (.+) \| .+ \| (.+) \|$", pages.on_page_markdown("[[moments]]"), re.M
    )
    names = [
        (re.findall(r"`(\w+)`", hooks), re.findall(r"`(\w+)`", parts)) for hooks, parts in rows
    ]
    assert sorted(hook for hooks, _ in names for hook in hooks) == sorted(HOOKS)
    shown = {(hook, part) for hooks, parts in names for hook in hooks for part in parts}
    part = build("umf(quantised(sparse(fedavg), down=8))")
    while isinstance(part, Part):
        assert part.hooks()
        assert {(hook, name_of(part)) for hook in part.hooks()} <= shown
        part = part.method
    assert "[[moments]]" in (DOCS / "architecture.md").read_text()


def test_the_page_about_methods_lists_the_interface() -> None:
    text = (DOCS / "own-method.md").read_text()
    table = text.partition("{#interface}")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)", table, re.M))
    members = {name for name in dir(Algorithm) if not name.startswith("_")} | {"state", "plan"}
    assert listed == members
    assert len(members) == 20
    facts = text.partition("{#facts}")[2].partition("\n## ")[0]
    of_parts = {"independent", "foreseeable", "needs_every_reply"}
    assert (
        set(re.findall(r"^\| `(\w+)`", facts, re.M))
        == {fact.name for fact in fields(Facts)} - of_parts
    )


def test_what_the_page_about_combining_says_is_refused_is_refused() -> None:
    table = (DOCS / "methods/composing.md").read_text().partition("{#requirements}")[2]
    rows = re.findall(r"^\| [a-z].+? \| (`.+`) \| (`.+`.*) \|$", table, re.M)
    assert len(rows) == 8
    for parts, examples in rows:
        for part in re.findall(r"`(.+?)`", parts):
            for method in re.findall(r"`(\w+)`", examples):
                first, *_ = combinations(method, part)
                assert first.reason, (part, method)


def test_the_page_about_combining_prints_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = [block for block in blocks("methods/composing.md", "sh") if " --with " in block]
    printed = blocks("methods/composing.md", "text")
    assert len(listed) == len(printed) == 2
    for command, text in zip(listed, printed, strict=True):
        assert main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == text


def test_an_unknown_marker_is_an_error() -> None:
    with pytest.raises(KeyError):
        pages.on_page_markdown("[[methods: persnal]]")
    with pytest.raises(KeyError):
        pages.on_page_markdown("[[modells]]")


def test_the_site_builds_without_a_warning_and_asks_no_other_server(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert len(built) > 15
    for page in built:
        text = page.read_text()
        assert "[[" not in re.sub(r"<code.*?</code>", "", text, flags=re.S), page
        fetched = re.findall(
            r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"', text
        )
        for address in (source or link for source, link in fetched):
            assert not re.match(r"(https?:)?//", address), (page, address)
    personal = (tmp_path / "site/methods/personal.html").read_text()
    assert 'id="ditto"' in personal
    assert "When to use it" in personal


def test_the_files_for_clusters_can_be_read_as_what_they_are() -> None:
    (script,) = (block for block in blocks("engines.md", "bash") if "#SBATCH" in block)
    checked = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    (manifest,) = map(yaml.safe_load, blocks("engines.md", "yaml"))
    cluster = manifest["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    for pod in pods:
        mounted = {
            mount["name"] for box in pod["containers"] for mount in box.get("volumeMounts", [])
        }
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
    cores = workers["replicas"] * int(pods[1]["containers"][0]["resources"]["requests"]["cpu"])
    command = shlex.split(manifest["spec"]["entrypoint"])
    assert f"workers={cores})" in command[-1]
    for text in (command[-1].partition("=")[2], "ray(address=auto, workers=64)"):
        require_engine_on(text, "cpu")
