"""pfl (pfl-research): users as resident tensors.

Several processes run through torchrun, as its documentation describes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import torch
import torch_models
import workload as w
from torch.nn import functional as F


def main() -> None:
    arguments = w.arguments(__doc__ or "")
    if arguments.processes > 1 and "LOCAL_RANK" not in os.environ:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={arguments.processes}",
            "--no_python",
        ]
        sys.exit(subprocess.call([*launch, sys.executable, *sys.argv]))
    torch.set_num_threads(max(1, arguments.cores // arguments.processes))
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    work = w.WORKLOADS[arguments.workload]
    data = work.data()
    inputs, labels = (torch.from_numpy(array) for array in data)
    kind = torch_models.MODELS[arguments.workload]

    class Trained(kind):  # type: ignore[misc, valid-type]
        def loss(self, x, y):  # type: ignore[no-untyped-def]
            return F.cross_entropy(self(x), y)

        def metrics(self, x, y):  # type: ignore[no-untyped-def]
            return {"loss": Weighted(float(F.cross_entropy(self(x), y)) * len(y), len(y))}

    torch.manual_seed(0)
    module = Trained()
    central = torch.optim.SGD(module.parameters(), lr=1.0)

    def optimizer(parameters, lr):  # type: ignore[no-untyped-def]
        return torch.optim.SGD(parameters, lr=lr, momentum=work.momentum)

    model = PyTorchModel(module, optimizer, central)
    turn = iter(range(10**9))
    draw = np.random.default_rng(0)

    def user(number: int) -> Dataset:
        order = torch.from_numpy(draw.permutation(work.samples))
        return Dataset([inputs[number][order], labels[number][order]], user_id=str(number))

    training = FederatedDataset(user, lambda: next(turn) % work.users)
    ends: list[float] = []

    class Clock(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics, model, *, central_iteration, **options
        ):  # type: ignore[no-untyped-def]
            ends.append(w.clock())
            return False, Metrics()

    rounds = arguments.warm_up + arguments.rounds
    began = w.clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=training, val_data=training),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=work.learning_rate, local_batch_size=work.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    if int(os.environ.get("RANK", 0)) == 0:
        probe = (torch.from_numpy(array) for array in work.probe(data))
        loss = torch_models.loss_of(module, *probe)
        w.tell(f"pfl, {arguments.processes} process(es)", ends, began, arguments.warm_up, loss)


if __name__ == "__main__":
    main()
