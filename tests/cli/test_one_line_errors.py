"""Wrong input at the command line and in a configuration ends with one line, and exit code 2.

One table for all commands. Nothing is printed on stdout, no traceback is shown and finished runs
stay as they are. At most the folder of the refused run is new. Tests of a part check its other errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedloom.cli import main
from fedloom.runs.config_file import LONGEST_FILE
from forking_cli import Say, require_one_short_line, saying

JOB = """
algorithm = "fedavg"
algorithms = ["fedavg", "fedmr(unit=tensor)"]
rounds = 3
model = "mlp"
threads = 1
workers = 1
[data]
clients = 4
"""

FINISHED = """
algorithm = "fedavg"
rounds = 1
model = "logistic"
threads = 1
[data]
clients = 4
"""
"""The run in the folder `runs/kept`."""


@dataclass(frozen=True)
class Wrong:
    """Wrong input and the line that answers it.

    Attributes:
        arguments: Arguments of `fedloom`.
        line: A part of the line.
        job: The content of job.toml.
    """

    arguments: tuple[str, ...]
    line: str
    job: bytes = JOB.encode()

    @property
    def id(self) -> str:
        text = " ".join(self.arguments)
        if self.job != JOB.encode():
            text += f" with {self.job[:20].decode(errors='replace')}"
        return text.replace("run job.toml ", "")[:60]


HEX = "0x" + "f" * 50_000  # Python parses this number but refuses to format it as a decimal
LONG = "y " * 49_999 + "yy"
HOST = "must be a name such as"

# --- one key of a configuration ---

KEYS = [
    ("rouns=3", "unknown key 'rouns': did you mean 'rounds'?"),
    ("data.client=3", "did you mean 'data.clients'?"),
    ("learning_rate=0.1", "did you mean 'training.learning_rate'?"),
    ("data.learning_rate=0.1", "did you mean 'training.learning_rate'?"),
    ("training.learning_rat=0.1", "did you mean 'training.learning_rate'?"),
    ("zzz=1", "unknown key 'zzz': there are rounds, participation, seed"),
    ("rounds=ten", "rounds must be a whole number, not 'ten'"),
    ("rounds=2.5", "rounds must be a whole number, not 2.5"),
    ("rounds=true", "rounds must be a whole number, not true"),
    ("rounds=0", "rounds must be at least 1, not 0"),
    ("seed.x=1", "seed must be a whole number, not {'x': 1}"),
    ("rounds.x=1", "'rounds.x' cannot be set: 'rounds' is no table"),
    ("model.x=1", "'model' is no table"),
    ("rounds", "'rounds' is not key=value"),
    ("=3", "'=3' is not key=value"),
    ("participation=0", "participation must be in (0, 1], not 0"),
    ("participation=1.01", "participation must be in (0, 1], not 1.01"),
    ("dropout=-0.1", "dropout must be in [0, 1), not -0.1"),
    ("dropout=1", "dropout must be in [0, 1), not 1"),
    ("new_clients=1", "new_clients must be in [0, 1), not 1"),
    ("evaluate_every=0", "evaluate_every must be at least 1, not 0"),
    ("checkpoint_every=0", "checkpoint_every must be at least 1, not 0"),
    ("pool_budget=4Gb", "pool_budget must be a number of bytes, such as 4GiB, not '4Gb'"),
    ("pool_budget=-1", "pool_budget must be at least 0, not -1"),
    (f"pool_budget='{400 * '9'}'", "pool_budget must be a number of bytes, such as 4GiB, not '99"),
    ("pool_budget=99999999999TB", "pool_budget must be between 0 and 9.22337e+18, not 9"),
    ("seed=-1", "seed must be at least 0, not -1"),
    ("seeds=[1, x]", "seeds[1] must be a whole number, not 'x'"),
    ("seeds=[1, 1]", "seeds must differ"),
    ("targets=[80]", "must be between 0 and 1, not 80"),
    ("targets=0.8", "targets must be a list, not 0.8"),
    ("targets=[nan]", "targets[0] must be greater than 0 and at most 3.4e+38 or text, not nan"),
    ("threads=0", "threads must be between 1 and"),
    ("workers=0", "workers must be at least 1"),
    ("name=a/b", "name 'a/b'"),
    ("record=none", "record must be a list, not 'none': write record=[] for none"),
    ("device=gpu", "device 'gpu' is not allowed: did you mean 'cuda'?"),
    ("directory='a\0b'", "directory must be text without NUL or lone surrogates, not "),
    ("data=digits", "data must be a table with the keys name, clients"),
    ("data.name=digit", "did you mean 'digits'?"),
    ("data.clients=many", "data.clients must be a whole number, not 'many'"),
    ("data.clients=-2", "data.clients must be at least 0, not -2"),
    ("data.clients=100000", "100000 clients"),
    ("data.local_test=1", "data.local_test must be in (0, 1), not 1"),
    ("data.merge=1", "data.merge must be true or false, not 1"),
    ("data.partition=dirichlt(0.1)", "did you mean 'dirichlet'?"),
    ("data.partition=dirichlet(beta=1)", "dirichlet has no parameter 'beta'"),
    ("data.partition=dirichlet(", "cannot read 'dirichlet('"),
    ("data.partition=dirichlet(0)", "alpha must be between 1e-09 and 1e+09"),
    ("data.partition=dirichlet(-1)", "alpha must be between 1e-09 and 1e+09"),
    ("training.momentum=-1", "training.momentum must be in [0, 1), not -1"),
    ("training.momentum=1", "training.momentum must be in [0, 1), not 1"),
    (
        "training.learning_rate=inf",
        "training.learning_rate must be greater than 0 and at most 3.4e+38, not inf",
    ),
    ("training.learning_rate=nan", "training.learning_rate must be greater than 0"),
    ("training.learning_rate='0.1'", "training.learning_rate must be a number, not '0.1'"),
    (
        "training.weight_decay=inf",
        "training.weight_decay must be at least 0 and at most 3.4e+38, not inf",
    ),
    ("training.optimizer=sdg", "did you mean 'sgd'?"),
    ("training.epochs=half", "training.epochs must be a whole number, not 'half'"),
    ("training.optimizer_options=3", "training.optimizer_options must be a table, not 3"),
    ("model=cnm4", "did you mean 'cnn4'?"),
    ("model=mlp(widths=[3])", "mlp has no parameter 'widths'"),
    ("model=mlp(200)", "hidden must be a list, not 200"),
    ("model=no.such:thing", "cannot import 'no.such'"),
    ("model=torch.nn:Linear(in_features=3, out_features=2)", "the model Linear does not accept"),
    ("algorithm=fedmrr", "did you mean 'fedmr'?"),
    ("algorithm=fedmr(fraction=0)", "fraction must be in (0, 1], not 0"),
    ("algorithm=fedmr(unit=segment, fraction=1.5)", "fraction must be in (0, 1], not 1.5"),
    ("algorithm=fedmr(unti=layer)", "did you mean 'unit'?"),
    ("algorithm=fedmr(unit=leaf)", "unit"),
    ("algorithm=stages(fedavg, fedmr)", "each but the last with its last round"),
    ("algorithm=fedavg:3", "is only allowed inside stages"),
    (
        "algorithm=quantised(fedavg, bucket=10000000000000)",
        "bucket must be between 1 and 1e+06, not 10000000000000",
    ),
    ("algorithms=[fedavg, fedmrr]", "did you mean 'fedmr'?"),
    ("algorithms=[fedmr, fedmr(unit=layer)]", "twice"),
    ("algorithms=fedavg", "algorithms must be a list or a table, not 'fedavg'"),
    # values that are too large, too long or too deep
    ("rounds=" + "9" * 5000, "rounds must be a whole number, not '999"),
    ("rounds=" + "9" * 4000, "rounds must be a number between -3.4e+38 and 3.4e+38, not 999"),
    ("rounds=" + "9" * 30, "rounds must be between 1 and 9.22337e+18, not 999"),
    ("training.learning_rate=" + "9" * 400, "training.learning_rate must be a number between"),
    (
        "training.learning_rate=1e400",
        "training.learning_rate must be greater than 0 and at most 3.4e+38, not inf",
    ),
    (
        f"rounds={HEX}",
        "rounds must be a number between -3.4e+38 and 3.4e+38, not a value of type int that is too "
        "long",
    ),
    (f"seed={HEX}", "seed must be a number between"),
    (f"settings.rounds=[{HEX}]", "settings.rounds must be a number between"),
    (
        f"training.optimizer_options={{betas=[{HEX}]}}",
        "training.optimizer_options must be a number between",
    ),
    ("algorithm=fedprox(mu=" + "9" * 400 + ")", "mu must be a number between"),
    ("rounds=" + "[" * 3000, "rounds must be a whole number, not '[[["),
    ("rounds=" + "[" * 60 + "]" * 60, "rounds nests more than 50 levels deep"),
    (".".join(["a"] * 3000) + "=1", "nests more than 50 levels deep"),
    ("algorithm=" + "umf(" * 3000, "nests more than 50 levels deep"),
    ("algorithm=a" + ":a" * 3000, "nests more than 50 levels deep"),
    ("name=" + "x" * 201, "at most 200 characters"),
    ("directory=" + "x" * 256, "directory must be a path of names of at most 255 bytes"),
    (
        "data.name=\"arrays(path='" + "x" * 5000 + "')\"",
        "path must be a path of names of at most 255 bytes, not 'xxx",
    ),
    (
        "data.name=\"images(folder='" + "x" * 256 + "')\"",
        "folder must be a path of names of at most 255 bytes",
    ),
    ("model=mlp(hidden=[1000000000000000])", "[enforce fail"),
    (
        "directory=a\udcffb",
        "directory must be text without NUL or lone surrogates, not 'a\\udcffb'",
    ),
    ("threads=1000000000", "threads must be between 1 and"),
    ("workers=100000", "workers must be at most"),
    ("engine=processes(workers=100000)", ", not 100000"),
    (
        "algorithm=secure(fedmr, repeats=1000000)",
        "repeats must be between 1 and 1000, not 1000000",
    ),
    (
        "settings={participation={from=0.1,to=0.5,steps=10000},dropout=[0,0.1]}",
        "10000 x 2 values have 20,000 combinations: at most 10,000 are allowed",
    ),
    *(
        (f"{key}={LONG}", "100,000 characters")
        for key in ("algorithm", "model", "engine", "device", "pool", "rounds")
    ),
    *(
        (f"data.{key}={LONG}", "100,000 characters")
        for key in ("name", "partition", "label_noise", "shift", "clients")
    ),
    *(
        (f"{key}={LONG}", "")
        for key in ("directory", "training.optimizer", "training.optimizer_options.x", "against")
    ),
    (f"algorithms=['{LONG}']", "100,000 characters"),
    (f"trackers=['{LONG}']", "100,000 characters"),
    (f"plugins=['{LONG}']", "cannot import"),
    (f"model='{LONG}:x'", "cannot import"),
    (f"algorithm=fedmr(unit='{LONG}')", "100,000 characters"),
    ("algorithm=fedmr(" + "q" * 100_000 + "=1)", "100,000 characters"),
    (LONG, "is not key=value"),
    ("k" * 100_000 + "=1", "unknown key 'kkk"),
]

COMPARED = [
    ("rouns=3", "unknown key 'rouns': did you mean 'rounds'?"),
    ("rounds=ten", "rounds must be a whole number, not 'ten'"),
    ("data.clients=100000", "100000 clients"),
    ("data.name=digit", "did you mean 'digits'?"),
    ("model=mlp(200)", "hidden must be a list, not 200"),
    ("model=no.such:thing", "cannot import 'no.such'"),
    ("algorithms=[fedavg, nothing]", "unknown algorithm 'nothing'"),
]
"""Keys that `compare` reads at different moments: parsing, data, partition and model."""

# --- the file ---

FILES = [
    (b"rounds = = 3", "is not a TOML file"),
    (b"\xff\xfe\x00", "codec can't decode byte 0xff"),
    (b"rounds = 3\nrounds = 4", "is not a TOML file"),
    (b"rounds = " + b"9" * 5000, "is not a TOML file"),
    (b"rounds = " + b"9" * 4000, "rounds must be a number between"),
    (b"rounds = " + HEX.encode(), "must be a number between"),
    (b"rounds = " + b"[" * 3000 + b"]" * 3000, "nests more than 50 levels deep"),
    (b"rounds = " + b"[" * 60 + b"]" * 60, "nests more than 50 levels deep"),
    (b"a." * 3000 + b"a = 1", "nests more than 50 levels deep"),
    (b"#" * (LONGEST_FILE + 1), "is longer than 4,194,304 bytes"),
    (b'"' + b"k" * 100_000, "is not a TOML file"),
    (
        JOB.replace('algorithm = "fedavg"', "").encode(),
        "give algorithm=..., the file compares 'fedavg', 'fedmr(unit=tensor)'",
    ),
]

# --- the arguments of each command ---

ARGUMENTS = {
    "": [
        ("rnu job.toml", "No such command 'rnu'"),
        ("models a b", "unexpected extra argument"),
        ("report runs/kept --record landscpe", "did you mean 'landscape'?"),
        (
            "report runs/kept --record similarity",
            "--record 'similarity': only landscape can be recorded afterwards",
        ),
        (
            "report runs/kept --record landscape(gird=3)",
            "landscape has no parameter 'gird': did you mean 'grid'?",
        ),
        (
            "report runs/kept --images gif",
            "image format 'gif' is not allowed (allowed: png, svg, pdf)",
        ),
        ("report nowhere", "nowhere does not exist: give a folder of runs"),
        ("report .", "holds no run: give the folder of a run or of a comparison"),
        ("watch nowhere", "nowhere does not exist: give a folder of runs"),
        (
            "predict nowhere new.csv",
            "nowhere must be or contain one finished run (there are: none)",
        ),
        ("export runs/kept --to onx", "--to 'onx' is not allowed: did you mean 'onnx'?"),
        ("new nothing/", "nothing"),
        ("compare job.toml --trials 3", "--trials 3 needs --tune"),
        ("tune job.toml --search training.epoch=[1]", "did you mean 'training.epochs'?"),
        ("check fedmrr", "did you mean 'fedmr'?"),
        ("check fedmr rounds=2", "rounds=2"),
    ],
    "run": [
        ("missing.toml", "cannot read missing.toml: no such file"),
        ("", "Missing argument 'FILE.toml'"),
        ("job.toml --frsh", "No such option"),
        ("job.toml --rounds 5", "--rounds is a key of the configuration: write rounds=5"),
        ("job.toml --evaluate-every=5", "is a key of the configuration: write evaluate_every=5"),
        ("job.toml --round 5", "(see fedloom run --help)"),
        ("job.toml algorithm=fedprox mu=0.1", "write algorithm='fedprox(mu=0.1)'"),
        ("job.toml algorithm=ala(fedprox) mu=0.1", "write algorithm='ala(fedprox(mu=0.1))'"),
    ],
    "list": [
        ("algorithms fedmrr", "did you mean 'fedmr'?"),
        ("fedmrr", "did you mean 'fedmr'? (fedloom list shows all kinds)"),
        ("methods fedmr", "unknown kind 'methods'"),
        ("fedmrr --with umf", "unknown algorithm 'fedmrr': did you mean 'fedmr'?"),
        ("fedmr --with umff", "unknown algorithm 'umff': did you mean 'umf'?"),
        ("fedmr --with umf(fedavgg)", "unknown algorithm 'fedavgg': did you mean 'fedavg'?"),
        ("fedmr --with sparse(share=7)", "sparse: share must be in (0, 1], not 7"),
        ("fedmr --with sparse(share", "cannot read 'sparse(share'"),
        ("--with umf", "--with needs two methods: fedloom list NAME --with Y"),
    ],
    "flower keys": [
        ("keys --sites 0", "sites must be at least 1, not 0"),
        ("keys --sites 2 --days 0", "days must be between 1 and 3650, not 0"),
        ("keys --sites 2 --host my_host!", f"host 'my_host!' {HOST}"),
        ("keys --sites 2 --host 10.0.0.256", f"host '10.0.0.256' {HOST}"),
        ("keys --sites 2 --host https://fl.example.org", f"host 'https://fl.example.org' {HOST}"),
        ("keys --sites 2 --host fl.example.org:8000", f"host 'fl.example.org:8000' {HOST}"),
        ("keys", "the number of sites is missing: give --sites, such as --sites 3"),
    ],
    "flower init": [
        ("my-app --host not_a_host!", f"host 'not_a_host!' {HOST}"),
        (
            "my_app",
            "folder 'my_app', the name of the app, must consist of letters, digits and hyphens",
        ),
        ("7-sites", "begin with a letter"),
        ("a" * 33, "at most 32 characters"),
        ("app algoritm=fedavg", "unknown key 'algoritm': did you mean 'algorithm'?"),
        ("app algorithm=fedmrr", "did you mean 'fedmr'?"),
        ("app none.toml", "cannot read none.toml"),
        (
            "app job.toml algorithm=none",
            "no method to train: give algorithm=..., the file compares 'fedavg', "
            "'fedmr(unit=tensor)'",
        ),
        ("app job.toml rounds", "'rounds' is not key=value"),
    ],
    "paper reproduce": [
        ("fedumf.table-a2 --data mnist", "is not NAME=FOLDER"),
        ("fedumf.table-a2 --seeds 0,x", "--seeds must be whole numbers"),
        ("fedumf.table-a2 --rounds 0", "rounds must be at least 1, not 0"),
        ("fedumf.table-a2 --workers 0", "workers must be at least 1"),
        ("fedumf.table-a2 rounds=3", "rounds is not set here"),
        ("fedumf.table-a2 trianing.epochs=3", "did you mean 'training'?"),
        ("fedala.table-1 --rows s=5~p=1", "tiny_imagenet"),
        ("fedumf.table-a2 --columns EMNIST-L~IID~15%", "--data emnist_l=FOLDER"),
    ],
}
"""Arguments by command; `~` is a space inside an argument."""


def entries() -> Iterator[Wrong]:
    for override, line in KEYS:
        yield Wrong(("run", "job.toml", override), line)
    for override, line in COMPARED:
        yield Wrong(("compare", "job.toml", override), line)
    for content, line in FILES:
        yield Wrong(("run", "job.toml"), line, content)
    for command, cases in ARGUMENTS.items():
        for words, line in cases:
            arguments = [word.replace("~", " ") for word in words.split()]
            yield Wrong((*command.split(), *arguments), line)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and the time of each file below a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run."""
    path = tmp_path_factory.mktemp("wrong")
    (path / "kept.toml").write_text(FINISHED)
    arguments = ["run", str(path / "kept.toml"), f"directory={path / 'runs' / 'kept'}", "--quiet"]
    assert main(arguments) == 0
    return path


@pytest.fixture
def fed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs a command in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    return saying(capsys)


@pytest.mark.parametrize("wrong", [*entries()], ids=lambda wrong: wrong.id)
def test_wrong_input_ends_with_one_line_and_loses_nothing(
    wrong: Wrong, folder: Path, fed: Say
) -> None:
    (folder / "job.toml").write_bytes(wrong.job)
    before = files(folder)
    code, out, err = fed(*wrong.arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fedloom: ")
    (line,) = err.splitlines()
    assert wrong.line in line
    require_one_short_line(line)
    after = files(folder)
    assert {name: after.get(name) for name in before} == before
    assert all(name.startswith("runs/job/") for name in after.keys() - before.keys())
