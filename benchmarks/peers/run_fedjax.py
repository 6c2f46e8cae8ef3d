"""FedJAX on the CPU: its own FedAvg with the jit back end.

The models are in stax, so that JAX compiles everything together.
"""

from __future__ import annotations

import os

import workload as w


def main() -> None:
    arguments = w.arguments(__doc__ or "")
    threads = "true" if arguments.cores > 1 else "false"
    os.environ["XLA_FLAGS"] = (
        f"--xla_cpu_multi_thread_eigen={threads} intra_op_parallelism_threads={arguments.cores}"
    )
    import jax

    # this FedJAX uses the name that JAX has removed
    jax.tree_map = jax.tree_util.tree_map
    import fedjax
    import jax.numpy as jnp
    import numpy as np
    from fedjax.algorithms import fed_avg
    from jax.example_libraries import stax

    work = w.WORKLOADS[arguments.workload]
    inputs, labels = work.data()
    if len(work.shape) == 3:  # channels last: the fastest layout in XLA
        inputs = np.ascontiguousarray(inputs.transpose(0, 1, 3, 4, 2))
    pool, relu, dense = stax.MaxPool((2, 2), strides=(2, 2)), stax.Relu, stax.Dense
    layers = {
        "mlp": (dense(200), relu, dense(200), relu, dense(10)),
        "cnn": (
            stax.Conv(32, (5, 5)), relu, pool, stax.Conv(64, (5, 5)), relu, pool,
            stax.Flatten, dense(512), relu, dense(10),
        ),
        "pfl": (
            stax.Conv(32, (3, 3)), relu, pool, stax.Conv(64, (3, 3)), relu, pool,
            stax.Flatten, dense(128), relu, dense(10),
        ),
    }  # fmt: skip
    init, apply = stax.serial(*layers[arguments.workload])
    _, params = init(jax.random.PRNGKey(0), (-1, *inputs.shape[2:]))

    def loss(params, batch, rng):  # type: ignore[no-untyped-def]
        logits = jax.nn.log_softmax(apply(params, batch["x"]))
        return -jnp.take_along_axis(logits, batch["y"][:, None], axis=1).mean()

    clients = [
        (
            str(user).encode(),
            fedjax.ClientDataset({"x": inputs[user], "y": labels[user].astype(np.int32)}),
        )
        for user in range(work.users)
    ]
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(work.learning_rate, momentum=work.momentum or None),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=1, seed=0),
    )
    state = algorithm.init(params)
    ends: list[float] = []
    began = w.clock()
    for number in range(arguments.warm_up + arguments.rounds):
        start = number * work.cohort
        chosen = [clients[(start + k) % work.users] for k in range(work.cohort)]
        keys = jax.random.split(jax.random.PRNGKey(number), work.cohort)
        state, _ = algorithm.apply(
            state, [(*client, key) for client, key in zip(chosen, keys, strict=True)]
        )
        jax.block_until_ready(state.params)
        ends.append(w.clock())
    flat = inputs.reshape(-1, *inputs.shape[2:])[:2000]
    batch = {"x": flat, "y": labels.reshape(-1)[:2000].astype(np.int32)}
    w.tell(
        "fedjax",
        ends,
        began,
        arguments.warm_up,
        float(loss(state.params, batch, None)),
        jax=jax.__version__,
    )


if __name__ == "__main__":
    main()
