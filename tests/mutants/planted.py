"""Faults to plant in the package, and the tests that must notice each of them.

Most have been in the package once, and changed published numbers or lost data without a message.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A planted fault.

    Attributes:
        name: What the fault does.
        path: The file, below `src/fedloom`.
        old: A text that occurs once in the file.
        new: The text that replaces it.
        tests: Arguments of pytest, below `tests`, of tests that must fail.
        trials: Trials of the chaos harness that must report something wrong.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()


MUTANTS = (
    # --- wrong numbers ---
    Mutant(
        "methods that only override deploy are scored by the global model",
        "algorithm/__init__.py",
        'DEPLOYMENT = ("deploy", "personalise", "complete")',
        'DEPLOYMENT = ("personalise", "complete")',
        ("parts/test_pipeline.py",),
    ),
    Mutant(
        "consecutive empty Poisson batches become one",
        "local/batches.py",
        "zip(inputs.split(sizes, 1), labels.split(sizes, 1), by_step, strict=False)",
        "zip(inputs.split(max(1, size), 1), labels.split(max(1, size), 1), by_step, strict=False)",
        ("parts/test_dp_sgd.py",),
    ),
    Mutant(
        "polls of losses pass by the privacy of a part",
        "parts/requirements.py",
        'for poll in pipeline.acting["poll"]:',
        'for poll in pipeline.acting["poll"][:0]:',
        ("parts/test_pipeline.py",),
    ),
    Mutant(
        "clients with few rows do not answer, which tells a row in spite of the noise",
        "survey/federated_statistics.py",
        "if not noise and _told(columns[name], values, about) < least:",
        "if _told(columns[name], values, about) < smallest:",
        ("survey/test_federated_statistics.py",),
    ),
    Mutant(
        "a server lowers the smallest number of rows of a site",
        "survey/federated_statistics.py",
        'least = 0 if noise else max(smallest, asked["smallest"])',
        'least = 0 if noise else asked["smallest"]',
        ("survey/test_federated_statistics.py",),
    ),
    Mutant(
        "methods count rounds from the start of the run, not of their stage",
        "algorithm/records.py",
        "return number - self.first_round",
        "return number - 1",
        ("parts/test_stages.py",),
    ),
    Mutant(
        "counters of batch norm are missing in the similarities of FedCross",
        "algorithms/fedcross.py",
        "rows = torch.cat([pool, integers.to(pool)], 1)",
        "rows = pool",
        ("algorithms/test_successors.py", "-k", "fedcross"),
    ),
    Mutant(
        "the referee calls each difference in loss a sum",
        "reviews/evidence/referee.py",
        "np.allclose(there, sizes * here, rtol=1e-3)",
        "len(there)",
        ("reviews/test_referee.py",),
    ),
    Mutant(
        "a replay confirms forged figures",
        "reviews/evidence/answers.py",
        "return abs(a - b) <= FIGURES * max(abs(a), abs(b)) + slack",
        "return True",
        ("reviews/test_replay.py", "-k", "forged"),
    ),
    # --- lost data and noise: the chaos harness must find these ---
    Mutant(
        "checkpoints and models are written in place",
        "state/tensors.py",
        'with replacing(path, mode=mode, durable=durable) as temporary, temporary.open("wb") '
        "as file:",
        'with path.open("wb") as file:',
        trials=("cuts",),
    ),
    Mutant(
        "figures of rounds after the checkpoint stay when a run resumes",
        "rounds/checkpoint.py",
        "records = self._until(finished)",
        "records = self.read()",
        trials=("cuts",),
    ),
    Mutant(
        "damaged tensors are read",
        "state/tensors.py",
        'if header.get("digest") != _checksum(tensors, about):',
        'if header.get("digest") is None:',
        trials=("inputs", "damages"),
    ),
    Mutant(
        "the noise of a private model over sites can be drawn again",
        "parts/private.py",
        'None if self.plan.remote else round.stream(f"privacy {purpose}")',
        'round.stream(f"privacy {purpose}")',
        trials=("noise",),
    ),
    Mutant(
        "sites add half of the noise that epsilon counts",
        "parts/local_private.py",
        "self.noise_multiplier() * self.bound() * noise",
        "0.5 * self.noise_multiplier() * self.bound() * noise",
        trials=("noise",),
    ),
    # --- each basis of the results once ---
    Mutant(
        "means do not weigh",
        "flat/population.py",
        "weights.to(rows) / weights.sum()",
        "torch.ones_like(rows[:, 0].flatten()[: len(rows)])",
        ("algorithms/test_fedavg.py",),
    ),
    Mutant(
        "momentum is missing",
        "local/optimizer.py",
        "torch._foreach_mul_(self.velocity, self.momentum)",
        "torch._foreach_mul_(self.velocity, 0.0)",
        ("algorithms/test_fedavg.py",),
    ),
    Mutant(
        "all units of layers have one permutation",
        "flat/population.py",
        "    for unit in units:\n        source = torch.randperm(count, generator=generator)\n",
        "    source = torch.randperm(count, generator=generator)\n    for unit in units:\n",
        ("algorithms/test_fedmr.py", "flat/test_population.py"),
    ),
    Mutant(
        "a failed round leaves what clients wrote",
        "rounds/federation.py",
        "self._midway = not self.engine.rollback()",
        "self._midway = False",
        (
            "state/test_store.py",
            "rounds/test_federation.py",
            "runs/test_resume.py",
            "rounds/test_divergence.py",
        ),
    ),
)
