"""fedloom: FedAvg or FedALA in the given engine; `default` is the choice of the rule."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch_models
import workload as w

from fedloom.common.device import keep_pages
from fedloom.data import Dataset, Partition, Samples
from fedloom.engines.choose import make_engine
from fedloom.parts.building import build
from fedloom.rounds.federation import Federation
from fedloom.rounds.schedule import Schedule
from fedloom.task.making import make_task

if __name__ == "__main__":
    arguments = w.arguments(__doc__ or "")
    engine_name = os.environ.get("FEDLOOM_ENGINE", "default")
    torch.set_num_threads(arguments.cores)
    keep_pages()
    work = w.WORKLOADS[arguments.workload]
    data = work.data()
    inputs, labels = (torch.from_numpy(array).flatten(0, 1) for array in data)
    samples = Samples(inputs, labels)
    task = make_task(
        Dataset("made", samples, samples[:10], 10),
        partition=Partition.from_sizes(np.arange(len(samples)), [work.samples] * work.users),
        model=torch_models.model(arguments.workload),
        training={
            "learning_rate": work.learning_rate,
            "batch_size": work.batch,
            "momentum": work.momentum,
        },
    )
    began = w.clock()
    rounds = arguments.warm_up + arguments.rounds
    schedule = Schedule(
        rounds=rounds, participation=work.cohort / work.users, seed=0, evaluate_every=rounds
    )
    engine = make_engine(engine_name, task)
    run = Federation(build(arguments.method), task, engine, schedule)
    ends: list[float] = []
    run.run(lambda *_: ends.append(w.clock()))
    module = torch_models.model(arguments.workload)
    task.layout.load(module, run.model())
    probe = (torch.from_numpy(array) for array in work.probe(data))
    w.tell(
        f"fedloom {engine_name}",
        ends,
        began,
        arguments.warm_up,
        torch_models.loss_of(module, *probe),
        chosen=engine.chosen.name,
    )
    engine.close()
    sys.exit(0)
