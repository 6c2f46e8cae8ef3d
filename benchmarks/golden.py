"""Record golden figures of many methods and nestings, to compare a new core with the old one.

    python benchmarks/golden.py record OUT [--only TEXT] [--engines rows,stacked,processes]
    python benchmarks/golden.py compare OLD NEW [--names MAP] [--only TEXT] [--examples 3]
    python benchmarks/golden.py resume OLD [--names MAP]

`record` writes `OUT/golden.jsonl`, one line for each case, sorted by its key. It leaves halted runs
under `OUT/checkpoints`, and writes the results of the whole runs to `OUT/checkpoints.jsonl`. A case
is an expression in a setting on an engine. Its line holds digests of the server's state, the global
model, its integer buffers and every client's memory. It also holds all lines of the history and the
client history, and the number of openings of each random stream in this process, without workers.
For a refused or failed run it holds the error.

`compare` groups the differences of two recordings by kind. `--names` names a JSON object of regular
expressions and their replacements, which rename the tensors of OLD first. The names in client
memory omit the number of the client. `resume` continues from the checkpoints of an older recording
with the present code.

Another source tree: PYTHONPATH=/path/to/tree/src python benchmarks/golden.py record OUT
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedloom
from fedloom.common import randomness
from fedloom.common.training import Training
from fedloom.data.dataset import Dataset, Samples
from fedloom.data.partition import Partition, split_train_test
from fedloom.engines.processes.parent import ProcessesEngine
from fedloom.engines.rows import RowsEngine
from fedloom.engines.stacked import StackedEngine
from fedloom.rounds.clock import Clock
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task import Task

Record = dict[str, Any]

ROUNDS = 4
HALT = 2
"""The halted runs end after this number of rounds."""

FEATURES, HIDDEN, CLASSES = 4, 5, 3
SIZES = (5, 9, 12, 6, 10, 8, 4, 13, 9)
"""Samples of the clients; 30 % are for tests: 3, 6, 8, 4, 7, 5, 2, 9 and 6 train."""

MODELS = ("plain", "norm", "frozen", "float32")
CLOCK = {"speed": "stragglers(100, 10)"}

SCHEDULES: Mapping[str, Record] = {
    "some": {"awaited": 5},
    "all": {"awaited": 9},
    "one": {"awaited": 1},
    "dropout": {"awaited": 5, "dropout": 0.4},
    "all dropout": {"awaited": 9, "dropout": 0.3},
    "poisson": {"awaited": 3, "participation_mode": "poisson"},
    "clock": {"awaited": 5, "clock": CLOCK | {"up": 5000.0, "down": 9000.0}},
    "deadline": {"awaited": 5, "clock": CLOCK | {"deadline": 0.3}},
    "over": {"awaited": 5, "clock": CLOCK | {"deadline": 0.5, "over_selection": 0.4}},
    "newcomers": {"awaited": 5, "new_clients": 0.3},
    "pool": {"awaited": 5, "pool_budget": 100},
}
"""Participation by name: arguments of `Schedule`, and the number of awaited replies."""

SINGLES = (
    "afl", "afl(mean_of_iterates=false)", "apfl", "apfl(adaptive=true)", "apfl(buffers=average)",
    "apple", "apple(variant=pfllib)", "cfl(mean_norm=1000.0, client_norm=0.0, first_round=0)",
    "clusamp", "ditto", "ditto(eval_point=after_train)", "fedadam", "fedah", "fedala(max_epochs=3)",
    "fedamp", "fedas", "fedasam(eta=0.1)", "fedavg", "fedavg(weighted=false)", "fedavg_c",
    "fedavgm", "fedbabu", "fedbn", "fedcross", "fedcross(partner=in_order, similarity=pairs)",
    "fedcross(propellers=2, propeller_rounds=2, averaging_rounds=1)", "feddbe", "feddc",
    "feddc_code", "feddyn", "fedexp", "fedexp(epsilon_by_clients=true)", "fedfomo",
    "fedfomo(models=2, exploration=0.5)",
    "fedgen(generator_steps=2, generator_batch=4, noise=2, hidden=4)", "fedkdmr(ramp=2)", "fedmr",
    "fedmr(unit=tensor)", "fedmr(unit=segment, fraction=0.5)", "fedmr(blend=0.3)",
    "fedmr(blend=auto, tolerance=0.05)", "fedmr(blend=[[2, 1.0], [4, 0.0]])", "fedmr_async(k=3)",
    "fedmr_async(k=2, blend=0.3)", "fedmut", "fednova", "fedpac", "fedper", "fedphp",
    "fedphp(deployed=local)", "fedproto", "fedproto(by=head, weighted=true)", "fedprox(mu=0.1)",
    "fedprox_c", "fedrep", "fedrep(head_epochs=1, upload_head=true)", "fedrod", "fedsam",
    "fedsam(swa=true, swa_start=0.5)", "fedyogi", "ifca", "indep", "lg_fedavg", "moon",
    "partialfed", "per_fedavg", "per_fedavg(variant=hessian_free)", "pfedfda",
    "pfedme(regularisation=1.0, beta=0.5)", "qfedavg(q=0.1)", "scaffold",
    "scaffold(option=1, server_learning_rate=0.5)", "scaffold_feddc", "silobn",
)  # fmt: skip
"""Methods without inner methods."""

WRAPPERS = (
    "umf({})",
    "umf({}, alpha=0.5, simulate_all=true)",
    "ala({}, max_epochs=3)",
    "ala_code({}, max_epochs=3, start_round=2)",
    "clustered({})",
    "clustered({}, by=size)",
    "clustered({}, distance=l1, weight=size)",
    "robust({}, rule=median)",
    "robust({})",
    "robust({}, rule=krum)",
    "robust({}, rule=multi_krum)",
    "robust({}, rule=clipping, steps=2)",
    "private({}, clip=0.5, noise=0.3)",
    "private({}, clip=0.5, noise=0.3, quantile=0.5)",
    "local_private({}, clip=0.5, noise=0.3)",
    "dp_sgd({}, noise=0.3)",
    "quantised({}, bits=4, bucket=8)",
    "quantised({}, down=8)",
    "quantised({}, stochastic=false)",
    "sparse({}, share=0.3)",
    "sparse({}, share=0.3, feedback=false)",
    "lowrank({}, rank=1)",
    "stages({}:1, fedavg)",
    "stages(fedavg:1, {})",
    "stages({}:2, fedmr)",
    "stages({}:auto, fedavg, patience=1, improvement=0.9)",
    "secure({})",
    "secure({}, repeats=1, when=before_upload)",
    "fedbuff({}, k=3)",
    "fedasync({})",
    "fedmr(local={})",
    "fedmr_async(k=3, local={})",
    "fedcross(local={})",
    "fedkdmr(local={}, ramp=2)",
    "indep(local={})",
    "fedntd({})",
    "fedlc({})",
    "feddecorr({})",
    "power_of_choice({})",
    "power_of_choice({}, ask=false, candidates=7)",
    "power_of_choice({}, samples=2)",
)
"""Wrappers, as expressions around a method."""

INSIDE = (
    "fedavg(weighted=false)", "fedavg", "fedprox(mu=0.1)", "scaffold", "fedmr", "fedrep",
    "fedgen(generator_steps=2, generator_batch=4, noise=2, hidden=4)", "feddyn", "fedmut", "ditto",
    "fedadam", "moon",
)  # fmt: skip
"""Inner methods for every wrapper."""

INSIDE_TWO = ("fedavg", "scaffold", "fedavg(weighted=false)", "fedmr", "fedprox(mu=0.1)", "fedrep")
"""Inner methods for pairs of wrappers, in turn."""

OUTER = (
    "umf({})", "ala({}, max_epochs=3)", "clustered({})", "clustered({}, by=size)",
    "robust({}, rule=median)", "robust({}, rule=krum)", "private({}, clip=0.5, noise=0.3)",
    "local_private({}, clip=0.5, noise=0.3)", "dp_sgd({}, noise=0.3)",
    "quantised({}, bits=4, bucket=8)", "quantised({}, down=8)", "sparse({}, share=0.3)",
    "lowrank({}, rank=1)", "stages({}:1, fedavg)", "stages(fedavg:1, {})",
    "stages({}:auto, fedavg, patience=1, improvement=0.9)", "secure({})", "fedbuff({}, k=3)",
    "fedasync({})", "fedmr(local={})", "fedmr_async(k=3, local={})", "fedntd({})", "fedlc({})",
    "feddecorr({})", "power_of_choice({})",
)  # fmt: skip
"""Wrappers for pairs, in both orders and around themselves."""

TRIPLES_EVERY = 89
"""One of this number of triples of outer wrappers is run."""

NESTINGS = (
    "stages(fedprox(mu=0.01):1, fedmr)",
    "stages(fedavg:auto, fedmr, patience=1)",
    "stages(scaffold:1, feddc)",
    "stages(umf(fedavg):1, fedmr)",
    "stages(clusamp:1, fedmr(unit='tensor'))",
    "stages(fedmr(blend=1.0):1, stages(fedmr(blend=[[2, 1.0], [4, 0.0]]):2, indep))",
    "stages(sparse(fedavg, share=0.5):2, sparse(fedavg, share=0.2))",
    "stages(sparse(fedavg, share=0.5):2, sparse(scaffold, share=0.5))",
    "stages(quantised(fedavg):1, quantised(fedmr, bits=4):3, lowrank(fedavg, rank=1))",
    "stages(fedavg:1, scaffold:2, fedmr:3, fedrep)",
    "stages(fedavg:auto, scaffold:auto, fedmr, patience=1, improvement=0.9)",
    "stages(power_of_choice(fedavg):2, power_of_choice(fedmr))",
    "stages(ala(fedavg, max_epochs=3):2, ala(fedmr, max_epochs=3))",
    "stages(fedavg:2, ditto, patience=2)",
    "stages(ditto:2, ditto(regularisation=1.0))",
    "stages(private(fedavg, clip=0.5, noise=0.3):2, fedavg)",
    "private(stages(fedavg:2, fedprox(mu=0.1)), clip=0.5, noise=0.3)",
    "private(stages(fedavg:auto, fedprox(mu=0.1), patience=1), clip=0.5, noise=0.3)",
    "fedmr(local=fedprox(mu=0.01))",
    "fedmr(unit='segment', fraction=0.5, local=moon(mu=1.0), blend=0.2)",
    "fedmr(local=fedntd(fedprox(mu=0.1)))",
    "fedmr(local=scaffold)",
    "fedmr(local=fedrep)",
    "fedmr(local=ala(fedavg, max_epochs=3))",
    "fedmr(local=fedmr)",
    "clustered(fedmr)",
    "clustered(fedmr, by='size')",
    "clustered(fedmr(local=fedprox(mu=0.01)), distance='l2')",
    "clustered(stages(fedavg:1, fedmr))",
    "clustered(scaffold, by='size')",
    "clustered(fedmut)",
    "clustered(clusamp)",
    "umf(fedmr)",
    "umf(fedmut)",
    "umf(feddc)",
    "umf(scaffold, alpha=0.5)",
    "umf(stages(fedavg:1, fedmr))",
    "umf(stages(fedavg:auto, fedmr, patience=1))",
    "umf(clusamp)",
    "umf(clustered(fedmr, by='size'))",
    "umf(fedmr(local=fedprox(mu=0.01)), simulate_all=true)",
    "ala(fedmr)",
    "ala(umf(fedprox(mu=0.1)))",
    "umf(ala(fedavg))",
    "umf(fedala(max_epochs=3))",
    "ala(stages(fedavg:1, fedmr))",
    "clustered(ala(fedavg))",
    "stages(ala(fedavg):1, ditto)",
    "quantised(sparse(umf(scaffold), share=0.2), down=4)",
    "quantised(sparse(private(fedavg, clip=0.5, noise=0.3), share=0.5), bits=8)",
    "quantised(quantised(fedavg, bits=4), bits=8, down=8)",
    "quantised(fedmr_async(k=3), bits=8)",
    "quantised(lowrank(fedavgm, rank=1), down=8)",
    "stages(lowrank(fedavg, rank=1):2, quantised(fedmr))",
    "robust(robust(fedavg, rule=median), rule=clipping)",
    "robust(private(fedavg, clip=0.5, noise=0.3))",
    "private(robust(fedavg), clip=0.5, noise=0.3)",
    "private(private(fedavg, clip=0.5, noise=0.3), clip=0.2, noise=0.2)",
    "private(fedavg, clip=0.5, target_epsilon=50.0)",
    "private(fedavg, clip=0.5, noise=0.0)",
    "private(fedavg, clip=0.5)",
    "local_private(dp_sgd(fedavg, noise=0.3), clip=0.5, noise=0.3)",
    "dp_sgd(fedavg, target_epsilon=50.0)",
    "fedbuff(robust(fedavg), k=3)",
    "robust(fedbuff(fedavg, k=3))",
    "fedbuff(fedbuff(fedavg, k=3), k=2)",
    "fedbuff(scaffold, k=2, staleness=0.0)",
    "fedbuff(quantised(sparse(fedavg, share=0.5)), k=3)",
    "fedasync(fedbuff(fedavg, k=3))",
    "fedasync(ala(fedlc(fedavg), max_epochs=3))",
    "secure(secure(fedmr))",
    "secure(fedmr(local=fedprox(mu=0.1)), when=before_train)",
    "secure(stages(fedavg:1, fedmr))",
    "stages(secure(fedmr):2, fedmr)",
    "umf(secure(fedmr))",
    "power_of_choice(power_of_choice(fedavg))",
    "power_of_choice(clusamp)",
    "fedntd(fedlc(feddecorr(fedavg)))",
    "feddecorr(fedlc(fedntd(scaffold)))",
    "fedlc(fedlc(fedavg))",
    "power_of_choice(fedlc(ala(umf(scaffold), max_epochs=3)))",
    "fedavg:3",
    "stages(fedavg:3, fedmr:2)",
    "stages(fedavg, fedmr)",
    "stages()",
    "umf",
    "umf(fedavg, beta=1)",
    "nothing",
    "fedmr(unit=wrong)",
    "ala(fedavg, percent=200)",
)  # fmt: skip
"""Nestings of every sort, and a few invalid ones."""

ELSEWHERE = (
    "fedavg", "scaffold", "fedmr", "fedrep",
    "fedgen(generator_steps=2, generator_batch=4, noise=2, hidden=4)", "feddyn", "ditto", "moon",
    "fedsam", "fednova", "ifca", "pfedfda", "per_fedavg", "fedproto", "fedfomo", "apple",
    "fedkdmr(ramp=2)", "fedmr_async(k=3)", "fedpac", "partialfed", "umf(fedmr)",
    "ala(fedavg, max_epochs=3)", "clustered(scaffold)", "robust(fedavg)",
    "robust(scaffold, rule=krum)", "private(fedavg, clip=0.5, noise=0.3)",
    "local_private(fedmr, clip=0.5, noise=0.3)", "dp_sgd(fedavg, noise=0.3)",
    "quantised(fedavg, bits=4)", "quantised(sparse(umf(scaffold), share=0.2), down=4)",
    "lowrank(fedavg, rank=1)", "secure(fedmr)", "stages(fedavg:auto, fedmr, patience=1)",
    "stages(scaffold:2, fedrep)", "fedbuff(robust(fedavg), k=3)", "fedasync(fedavg)",
    "fedntd(fedlc(fedavg))", "feddecorr(ala(fedmr, max_epochs=3))", "power_of_choice(fedavg)",
    "power_of_choice(umf(fedlc(scaffold)))", "fedmr(local=fedprox(mu=0.1))",
)  # fmt: skip
"""Expressions for the other engines too."""

HALTED: Sequence[tuple[str, str, str]] = (
    ("fedavg", "plain", "some"), ("scaffold", "norm", "some"), ("fedmr", "norm", "some"),
    ("fedmr(blend=0.3)", "plain", "pool"), ("stages(fedavg:2, fedmr)", "plain", "pool"),
    ("fedrep", "plain", "dropout"), ("ditto", "norm", "some"), ("fedadam", "float32", "some"),
    ("feddyn", "plain", "some"),
    ("cfl(mean_norm=1000.0, client_norm=0.0, first_round=0)", "plain", "all"),
    ("fedgen(generator_steps=2, generator_batch=4, noise=2, hidden=4)", "plain", "some"),
    ("fedmr_async(k=3)", "plain", "clock"), ("fedcross", "plain", "some"),
    ("fedfomo", "plain", "some"), ("umf(fedmut)", "plain", "some"),
    ("umf(scaffold)", "norm", "dropout"), ("ala(fedlc(fedavg), max_epochs=3)", "plain", "some"),
    ("ala(umf(fedprox(mu=0.1)), max_epochs=3)", "plain", "some"),
    ("clustered(scaffold)", "plain", "some"), ("robust(fedavg, rule=clipping)", "plain", "some"),
    ("private(fedavg, clip=0.5, noise=0.3, quantile=0.5)", "plain", "all"),
    ("private(fedavg, clip=0.5, noise=0.3)", "plain", "poisson"),
    ("local_private(fedmr, clip=0.5, noise=0.3)", "plain", "some"),
    ("dp_sgd(fedavg, noise=0.3)", "plain", "some"),
    ("quantised(sparse(umf(scaffold), share=0.2), down=4)", "plain", "some"),
    ("lowrank(fedavg, rank=1)", "plain", "some"), ("sparse(fedavg, share=0.3)", "frozen", "some"),
    ("stages(scaffold:1, fedmr)", "plain", "some"), ("stages(fedavg:2, scaffold)", "plain", "some"),
    ("stages(fedavg:3, ala(scaffold, max_epochs=3))", "plain", "some"),
    ("stages(fedavg:auto, fedmr, patience=1)", "plain", "some"), ("secure(fedmr)", "plain", "some"),
    ("fedbuff(fedavg, k=3)", "plain", "clock"),
    ("quantised(fedbuff(fedavg, k=2))", "plain", "some"), ("fedasync(fedavg)", "plain", "deadline"),
    ("power_of_choice(fedntd(fedavg))", "plain", "some"),
)  # fmt: skip
"""Expression, model and schedule of the runs that are halted and resumed."""


@dataclass(frozen=True, order=True)
class Case:
    """An expression in a setting on an engine."""

    expression: str
    model: str
    schedule: str
    engine: str = "rows"

    @property
    def key(self) -> str:
        """Return a unique name of the case."""
        return f"{self.expression} | {self.model}, {self.schedule}, {self.engine}"


def every_case() -> list[Case]:
    """Return all cases, each once, sorted."""
    cases = [*single_cases(), *wrapped_cases(), *nested_cases(), *twice_wrapped_cases()]
    for engine in ("stacked", "processes"):
        cases += elsewhere_cases(engine)
    return sorted(set(cases))


def single_cases() -> Iterator[Case]:
    """Yield every method with every model and with every schedule."""
    for number, expression in enumerate(SINGLES):
        for model in MODELS:
            yield Case(expression, model, "all")
        for turn, schedule in enumerate(SCHEDULES):
            yield Case(expression, MODELS[(number + turn) % len(MODELS)], schedule)


def wrapped_cases() -> Iterator[Case]:
    """Yield every wrapper around some methods, with models and schedules in turn."""
    schedules = itertools.cycle(SCHEDULES)
    for number, wrapper in enumerate(WRAPPERS):
        for turn, method in enumerate(INSIDE):
            expression = wrapper.format(method)
            model = MODELS[(number + turn) % len(MODELS)]
            yield Case(expression, "plain", "all")
            yield Case(expression, model, "some")
            yield Case(expression, model, next(schedules))


def nested_cases() -> Iterator[Case]:
    """Yield the nestings of the list with part of the clients and with all, models in turn."""
    for number, expression in enumerate(NESTINGS):
        yield Case(expression, "plain", "all")
        yield Case(expression, "norm", "some")
        yield Case(expression, MODELS[number % len(MODELS)], [*SCHEDULES][number % len(SCHEDULES)])


def twice_wrapped_cases() -> Iterator[Case]:
    """Yield all pairs of wrappers around methods in turn, and some triples."""
    pairs = [outer.format(inner) for outer in OUTER for inner in OUTER]
    triples = [a.format(b.format(c)) for a in OUTER for b in OUTER for c in OUTER]
    methods = itertools.cycle(INSIDE_TWO)
    schedules = itertools.cycle(("all", "all", "all dropout", "all", "poisson"))
    for number, wrapper in enumerate([*pairs, *triples[::TRIPLES_EVERY]]):
        expression = wrapper.format(next(methods))
        yield Case(expression, "plain", next(schedules))
        yield Case(expression, MODELS[number % len(MODELS)], "some")


def elsewhere_cases(engine: str) -> Iterator[Case]:
    """Yield the cases of other engines than rows."""
    for number, expression in enumerate(ELSEWHERE):
        yield Case(expression, ("plain", "norm")[number % 2], "all", engine)


@cache
def task_of(kind: str) -> Task:
    """Return unequal clients with random data and test data.

    `kind` is plain, norm (batch norm), frozen (a bias that does not train) or float32. Models have
    tanh, except float32 with a ReLU.
    """
    generator = torch.Generator().manual_seed(11)
    dtype = torch.float32 if kind == "float32" else torch.float64
    inputs = torch.randn(sum(SIZES), FEATURES, dtype=dtype, generator=generator)
    samples = Samples(inputs, torch.randint(CLASSES, (len(inputs),), generator=generator))
    edges = [0, *itertools.accumulate(SIZES)]
    whole = Partition.of([list(range(start, end)) for start, end in itertools.pairwise(edges)])
    partition, tested = split_train_test(whole, 0, 0.3)
    training = Training(learning_rate=0.1, decay=0.9, batch_size=7, weight_decay=1e-2)
    dataset = Dataset("random", samples, samples, CLASSES)
    return Task(dataset, samples, samples, partition, make_model(kind, dtype), training, tested)


def make_model(kind: str, dtype: torch.dtype) -> nn.Module:
    """Return two layers with the same initial weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = OrderedDict[str, nn.Module](lower=nn.Linear(FEATURES, HIDDEN))
        if kind == "norm":
            layers["norm"] = nn.BatchNorm1d(HIDDEN)
        layers["activation"] = nn.ReLU() if kind == "float32" else nn.Tanh()
        layers["head"] = nn.Linear(HIDDEN, CLASSES)
        module = nn.Sequential(layers).to(dtype)
    if kind == "frozen":
        layers["lower"].get_parameter("bias").requires_grad_(False)
    return module


@cache
def engine_of(name: str, kind: str) -> Any:
    """Return the engine of a name for the tasks of a kind, made once."""
    task = task_of(kind)
    if name == "processes":
        return ProcessesEngine(task, workers=2)
    return (StackedEngine if name == "stacked" else RowsEngine)(task)


def close_engines(cases: Iterable[Case]) -> None:
    """Close the engines of these cases."""
    for name, kind in {(case.engine, case.model) for case in cases}:
        engine_of(name, kind).close()


def schedule_of(name: str) -> Schedule:
    """Return the schedule of a name, with an evaluation of everything in every round."""
    options = dict(SCHEDULES[name])
    clients = len(SIZES) - int(options.get("new_clients", 0.0) * len(SIZES))
    participation = min(1.0, options.pop("awaited") / clients + 1e-9)
    if "clock" in options:
        options["clock"] = Clock(**options["clock"])
    options |= {"evaluate_every": 1, "personal_every": 1}
    return Schedule(rounds=ROUNDS, participation=participation, seed=3, **options)


@cache
def build_function() -> Callable[[str], Any]:
    """Return the present code's function that builds methods from expressions."""
    for module in ("fedloom.algorithms.building", "fedloom.parts.building"):
        with suppress(ModuleNotFoundError):
            function: Callable[[str], Any] = importlib.import_module(module).build
            return function
    raise SystemExit("there is no build(expression) in fedloom")


@dataclass
class Streams:
    """Counts the random streams that are opened in this process."""

    opened: Counter[str] = field(default_factory=Counter)

    def listen(self) -> None:
        """Replace the functions that open streams in all modules that import them."""
        kinds = {"stream": "", "numpy_stream": "numpy ", "global_stream": "global "}
        counting = {}
        for name, kind in kinds.items():
            original = getattr(randomness, name)
            counting[id(original)] = self._counting(original, kind)
        for title, module in list(sys.modules.items()):
            if title.partition(".")[0] != "fedloom":
                continue
            for name, value in list(vars(module).items()):
                if id(value) in counting:
                    setattr(module, name, counting[id(value)])

    def _counting(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @wraps(original)
        def opening(seed: int, purpose: str, **options: Any) -> Any:
            place = f"{seed}/{options.get('round', 0)}/{options.get('client', -1)}"
            self.opened[f"{kind}{purpose} | {place}"] += 1
            return original(seed, purpose, **options)

        return opening


def digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bytes."""
    whole = tensor.detach().cpu().contiguous()
    head = f"{whole.dtype} {list(whole.shape)}"
    content = whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b""
    return f"{head} {hashlib.sha256(head.encode() + content).hexdigest()[:20]}"


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digests of named tensors."""
    return {name: digest(tensor) for name, tensor in sorted(tensors.items())}


def figures_of(federation: Federation) -> Record:
    """Return all compared values of a federation after its last round."""
    target: Any = federation
    new = hasattr(target, "server_state")
    state = target.server_state() if new else target.algorithm.full_state()
    model = target.model() if hasattr(target, "model") else target.algorithm.model()
    return {
        "state": digests(state),
        "model": digest(model),
        "integers": digest(federation.integers),
        "memory": digests(federation.engine.memory()),
        "history": list(federation.history),
        "client_history": list(federation.client_history),
    }


def make_federation(case: Case, directory: Path | None = None) -> Federation:
    """Return the federation of a case; it continues if the directory holds a checkpoint."""
    method = build_function()(case.expression)
    task, engine = task_of(case.model), engine_of(case.engine, case.model)
    return Federation(method, task, engine, schedule_of(case.schedule), directory)


def run_case(case: Case, streams: Streams) -> Record:
    """Return the line of a case: its figures, or the error of a refused or failed run."""
    streams.opened.clear()
    line: Record = {"key": case.key}
    federation: Federation | None = None
    try:
        federation = make_federation(case)
        for _ in range(ROUNDS):
            federation.step()
    except Exception as error:
        line["refused" if federation is None else "failed"] = f"{type(error).__name__}: {error}"
    if federation is not None:
        line["text"] = str(build_function()(case.expression))
        line |= figures_of(federation)
        line["streams"] = dict(sorted(streams.opened.items()))
    return line


def write_lines(path: Path, lines: Iterable[Record]) -> None:
    """Write one JSON line for each record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line, sort_keys=True)}\n" for line in lines))


def read_lines(path: Path, only: str = "") -> dict[str, Record]:
    """Return the records of a file, if it exists, with `only` in their keys, by their keys."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["key"]: line for line in lines if only in line["key"]}


def record(out: Path, only: str, engines: Sequence[str]) -> None:
    """Record all cases with `only` in their key, and the halted runs."""
    began = time.perf_counter()
    cases = [case for case in every_case() if only in case.key and case.engine in engines]
    for case in cases:
        engine_of(case.engine, case.model)  # its proof draws once, in no case
    streams = Streams()
    streams.listen()
    lines = [run_case(case, streams) for case in cases]
    write_lines(out / "golden.jsonl", lines)
    if not only:
        record_checkpoints(out)
    close_engines(cases)
    refused = sum("refused" in line for line in lines)
    failed = sum("failed" in line for line in lines)
    print(f"fedloom of {Path(fedloom.__file__).parent}")
    print(f"{len(lines)} cases: {refused} refused, {failed} failed in a round")
    print(f"{time.perf_counter() - began:.0f} s")


def record_checkpoints(out: Path) -> None:
    """Halt runs after some rounds; store their directories and the results of whole runs."""
    folder = out / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    lines = []
    for number, facts in enumerate(HALTED):
        case = Case(*facts)
        federation = make_federation(case)
        for _ in range(ROUNDS):
            federation.step()
        line: Record = {"key": case.key, "folder": str(number), "case": facts}
        lines.append(line | figures_of(federation))
        directory = folder / str(number)
        directory.mkdir(parents=True)
        halted = make_federation(case, directory)
        for _ in range(HALT):
            halted.step()
        halted.save()
    write_lines(out / "checkpoints.jsonl", lines)


def resume(out: Path, names: Path | None) -> int:
    """Resume copies of halted runs, and compare their ends with whole runs."""
    renames = read_renames(names)
    differences: dict[str, list[str]] = defaultdict(list)
    expected = read_lines(out / "checkpoints.jsonl")
    for key, line in expected.items():
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) / "run"
            shutil.copytree(out / "checkpoints" / line["folder"], directory)
            whole = renamed(line, renames)
            for difference in resumed_differences(Case(*line["case"]), directory, whole):
                differences[difference].append(key)
    return tell(differences, len(expected), examples=3)


def resumed_differences(case: Case, directory: Path, expected: Record) -> Iterator[str]:
    """Yield the differences at the end of a run that continues in the directory."""
    try:
        federation = make_federation(case, directory)
        finished = len(federation.history)
        if finished != HALT:
            yield f"resume: begins after round {finished}, not {HALT}"
        while len(federation.history) < ROUNDS:
            federation.step()
        yield from compared(expected, figures_of(federation))
    except Exception as error:
        yield f"resume: {type(error).__name__}: {re.sub(r'/tmp/[^:]*/', '', str(error))}"


def compare(old: Path, new: Path, names: Path | None, only: str, examples: int) -> int:
    """Print the differences of two recordings; return 1 if any.

    Only cases with `only` in their key are compared.
    """
    renames = read_renames(names)
    differences: dict[str, list[str]] = defaultdict(list)
    total = 0
    for file in ("golden.jsonl", "checkpoints.jsonl"):
        before = read_lines(old / file, only)
        after = read_lines(new / file, only)
        total += len(before)
        for key in sorted(before.keys() | after.keys()):
            if key not in after or key not in before:
                differences["case: only in " + ("old" if key in before else "new")].append(key)
                continue
            for difference in compared(renamed(before[key], renames), after[key]):
                differences[difference].append(key)
    return tell(differences, total, examples)


def read_renames(path: Path | None) -> dict[str, str]:
    """Return the replacements of a JSON file, if it exists."""
    renames: dict[str, str] = {} if path is None else json.loads(path.read_text())
    return renames


def renamed(line: Record, renames: Mapping[str, str]) -> Record:
    """Return a line with renamed tensors."""
    changed = dict(line)
    for part in ("state", "memory"):
        if part in line:
            changed[part] = {rename(name, renames): value for name, value in line[part].items()}
    return changed


def rename(name: str, renames: Mapping[str, str]) -> str:
    """Return a name after all replacements, one after another; a client's number is unchanged."""
    client, slash, own = name.rpartition("/")
    for pattern, replacement in renames.items():
        own = re.sub(pattern, replacement, own)
    return f"{client}{slash}{own}"


def compared(old: Record, new: Record) -> Iterator[str]:
    """Yield each kind of difference between two lines, once."""
    found = dict.fromkeys(all_differences(old, new))
    yield from found


def all_differences(old: Record, new: Record) -> Iterator[str]:
    """Yield the kinds of differences between two lines, perhaps repeatedly."""
    for end in ("refused", "failed"):
        if (end in old) != (end in new):
            text = new.get(end) or old[end]
            yield f"{end}: only in {'new' if end in new else 'old'}: {text}"
        elif old.get(end) != new.get(end):
            yield f"{end}: {old[end]!r} is now {new[end]!r}"
    for part in ("text", "model", "integers"):
        if part in old and part in new and old[part] != new[part]:
            yield f"{part}: another one"
    for part in ("state", "memory"):
        if part in old and part in new:
            yield from tensor_differences(part, old[part], new[part])
    for part in ("history", "client_history"):
        if part in old and part in new:
            yield from history_differences(part, old[part], new[part])
    if "streams" in old and "streams" in new:
        yield from stream_differences(old["streams"], new["streams"])


def tensor_differences(part: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    """Yield names that are missing, extra or have another digest; `#` replaces each client."""
    for name in sorted(old.keys() | new.keys()):
        general = re.sub(r"^\d+/", "#/", name) if part == "memory" else name
        if name not in new:
            yield f"{part}: lacks {general}"
        elif name not in old:
            yield f"{part}: extra {general}"
        elif old[name] != new[name]:
            yield f"{part}: another digest of {general}"


def history_differences(part: str, old: Sequence[Record], new: Sequence[Record]) -> Iterator[str]:
    """Yield the keys of records with differences."""
    if len(old) != len(new):
        yield f"{part}: another number of lines"
    for before, after in zip(old, new, strict=False):
        for name in sorted(before.keys() | after.keys()):
            if name not in after or name not in before:
                yield f"{part}: {'lacks' if name in before else 'extra'} {name}"
            elif as_json(before[name]) != as_json(after[name]):
                yield f"{part}: {name}"


def as_json(value: object) -> str:
    """Return a value as text; undefined numbers are equal."""
    return json.dumps(value, sort_keys=True)


def stream_differences(old: Mapping[str, int], new: Mapping[str, int]) -> Iterator[str]:
    """Yield the purposes of streams with different numbers of openings."""
    for name in sorted(old.keys() | new.keys()):
        purpose = name.partition(" | ")[0]
        if name not in new or name not in old:
            yield f"streams: {'lacks' if name in old else 'extra'} {purpose}"
        elif old[name] != new[name]:
            yield f"streams: opened {'more' if new[name] > old[name] else 'less'} often: {purpose}"


def tell(differences: Mapping[str, Sequence[str]], total: int, examples: int) -> int:
    """Print differences by kind, the most frequent first within each part; return 1 if any."""
    different = {key for keys in differences.values() for key in keys}
    groups = Counter(kind.partition(":")[0] for kind in differences for _ in differences[kind])
    print(f"{total} cases, of which {len(different)} differ; by part: {dict(groups)}")
    order = sorted(differences, key=lambda kind: (kind.partition(":")[0], -len(differences[kind])))
    for kind in order:
        print(f"{len(differences[kind]):5}  {kind}")
        for key in differences[kind][:examples]:
            print(f"         {key}")
    return int(bool(different))


def main() -> int:
    """Read and execute the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--only", default="", help="only cases whose key holds this text")
    recording.add_argument("--engines", default="rows,stacked,processes")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--names", type=Path, help="JSON: {pattern: replacement}")
    comparing.add_argument("--only", default="", help="only cases whose key holds this text")
    comparing.add_argument("--examples", type=int, default=3, help="cases shown of a difference")
    resuming = commands.add_parser("resume")
    resuming.add_argument("out", type=Path)
    resuming.add_argument("--names", type=Path, help="JSON: {pattern: replacement}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    if arguments.command == "compare":
        settings = arguments.names, arguments.only, arguments.examples
        return compare(arguments.old, arguments.new, *settings)
    if arguments.command == "resume":
        return resume(arguments.out, arguments.names)
    record(arguments.out, arguments.only, arguments.engines.split(","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
