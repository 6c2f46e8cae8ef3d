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
    # --- engines: each fault is noticed by a claim of the conformance suite ---
    Mutant(
        "a client that fails in another process loses its error",
        "engines/dispatch.py",
        "yield Fault(job, result.reason, result.error)",
        "yield Fault(job, result.reason)",
        ("engines/test_conformance.py", "-k", "everybody_fails and processes"),
    ),
    Mutant(
        "workers do not receive the memory of clients",
        "engines/client_work.py",
        "            if client.memory:\n",
        "            if not client.memory:\n",
        ("engines/test_conformance.py", "-k", "lost_replies and processes"),
    ),
    Mutant(
        "clients in a stack draw the same dropout",
        "engines/stacked.py",
        '[round.stream("layers", client) for client in drawing]',
        '[round.stream("layers", clients[0]) for client in drawing]',
        ("engines/test_conformance.py", "-k", "lost_replies and stacked and not processes"),
    ),
    Mutant(
        "a client fails at the first death of its worker",
        "engines/dispatch.py",
        "self._deaths[id(jobs[0])] >= ATTEMPTS",
        "self._deaths[id(jobs[0])] >= 1",
        ("engines/test_conformance.py", "-k", "dies and processes"),
    ),
    Mutant(
        "answers of a round that was left reach the next one",
        "engines/dispatch.py",
        "        finally:\n            self._ignore_answers()",
        "        finally:\n            pass",
        ("engines/test_conformance.py", "-k", "left_early and processes"),
    ),
    Mutant(
        "the end of a round is missing in workers",
        "engines/dispatch.py",
        "assignment = Assignment(pipeline, round, expected, _shared_tensors(jobs))",
        "assignment = Assignment(\n"
        "            pipeline, replace(round, closes=None), expected, _shared_tensors(jobs)\n"
        "        )",
        ("engines/test_conformance.py", "-k", "every_field and processes"),
    ),
    Mutant(
        "FedSAM measures the gradients of a stack together",
        "algorithms/sharpness.py",
        "vectors.norm(dim=1, keepdim=True)",
        "vectors.norm()",
        ("engines/test_conformance.py", "-k", "every_method and fedsam and processes"),
    ),
    Mutant(
        "a failure in a stack fails all its clients",
        "engines/rows.py",
        "            if len(jobs) > 1:\n                raise\n",
        "            if len(jobs) > 1:\n"
        "                return [Fault(job, str(error), error) for job in jobs]\n",
        ("engines/test_conformance.py", "-k", "harm_no_other and stacked and not processes"),
    ),
    Mutant(
        "replies of a later round overwrite earlier ones",
        "engines/rows.py",
        "tensors = {name: rows[row] for name, rows in message.items()}",
        "tensors = {\n"
        '                name: self.__dict__.setdefault(f"kept {name} {row}", rows[row]).copy_(rows[row])\n'
        "                for name, rows in message.items()\n"
        "            }",
        ("engines/test_conformance.py", "-k", "replies_stay and rows"),
    ),
    Mutant(
        "the server's state is sent to workers",
        "engines/pickling.py",
        'if name != "state"',
        'if name != "status"',
        ("engines/test_conformance.py", "-k", "servers_state and processes"),
    ),
)
