"""Finds where two implementations of a method differ: the round, client, step and tensor, and
frequent causes.

The change of each tensor is the measure: a difference counts if it exceeds a share of the change,
and rounding. A vector of the traces that is nearly parallel to a difference explains it.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedloom.common.errors import DataError
from fedloom.reviews.evidence.trace import Array, Key, Trace

_ROUNDING = 4e-6  # relative error of numbers that were computed in float32 in another order
_UNEXPLAINED = 0.1  # the largest share of a difference that may be left where a vector explains it
_STAGES = {"in": "what it is sent", "out": "what it sends", "end": "its state after the round"}
_ROLES = ("before", "samples", "loss", "after")
_OTHERWISE = {
    "before": "the weights of a blend: begun anew or kept from the client's last time, not "
    "clipped, learned with another rate, "
    "for another time or on other samples",
    "loss": "a term of the loss, its weight, how inputs are prepared, dropout, batch norm in "
    "evaluation mode",
    "after": "the gradient: a term of the loss, a correction, clipping, another optimizer",
}


def compare(a: Trace, b: Trace, tolerance: float = 1e-3) -> list[str]:
    """Return location, size and frequent causes of the first difference between two traces.

    Only entries of both traces are compared.

    Args:
        a: The trace of a run of fedloom.
        b: The trace of the other program.
        tolerance: Allowed difference as a share of the tensor's change.

    Returns:
        Location, size, and a line for each cause; empty if the traces agree.

    Raises:
        DataError: The traces have no tensor in common.
    """
    if not a.keys() & b.keys():
        names = ["/".join(map(str, min(trace, default=()))) for trace in (a, b)]
        raise DataError(f"the traces have no tensor in common, such as {names[0]} and {names[1]}")
    for number in (number for number in a.clients if number in b.clients):
        lists = [", ".join(sorted(trace.clients[number], key=int)) for trace in (a, b)]
        if lists[0] != lists[1]:
            return [
                f"round {number}",
                f"A trains clients {lists[0]}, B {lists[1]}",
                "selection of clients",
            ]
        for client in (*a.clients[number], "server"):
            steps = [trace.steps(number, client) for trace in (a, b)]
            keys = [key for key in a if key[:2] == (number, client) and key in b]
            location = (
                f"round {number}, {'the server' if client == 'server' else f'client {client}'}"
            )
            for stage in ("in", *steps[0], "out", "end"):
                here = [key for key in keys if key.stage == stage]
                for key in sorted(
                    here, key=lambda key: _ROLES.index(key.role) if key.role in _ROLES else 0
                ):
                    if _share(a, b, key) > tolerance:
                        alike = [
                            k for k in here if k.role == key.role and _share(a, b, k) > tolerance
                        ]
                        moment = _STAGES.get(stage, f"local step {stage}")
                        location += f", {moment}: {key.role} {key.tensor}"
                        return [location, _size(a, b, alike), *_causes(a, b, alike)]
            if all(steps) and steps[0] != steps[1]:
                cause = (
                    "the number of local epochs, or a last, smaller batch, which one of them drops"
                )
                return [location, f"A takes {len(steps[0])} local steps, B {len(steps[1])}", cause]
    return []


def _share(a: Trace, b: Trace, key: Key) -> float:
    """Return a difference as a share of the way that the tensor moved in A; 0 where rounding
    explains it.
    """
    if a[key].shape != b[key].shape or not np.isfinite(b[key]).all():
        return np.inf
    if key.role == "samples" or not a[key].size:
        return 0.0 if np.array_equal(np.sort(a[key], None), np.sort(b[key], None)) else np.inf
    gap = float(np.abs(b[key] - a[key]).max())
    size = float(np.abs(a[key]).max())
    earlier = a.earlier(key)
    way = (
        0.0
        if earlier is None or earlier.shape != a[key].shape
        else float(np.abs(a[key] - earlier).max())
    )
    return (
        0.0
        if gap <= max(_ROUNDING * size, 1e-12)
        else gap / (way if way > _ROUNDING * size else size or 1.0)
    )


def _size(a: Trace, b: Trace, alike: Sequence[Key]) -> str:
    key = alike[0]
    if a[key].shape != b[key].shape or key.role == "samples" or a[key].size == 1:
        return f"A has {np.ravel(a[key])[:8].tolist()}, B {np.ravel(b[key])[:8].tolist()}"
    text = (
        f"B differs by {np.abs(b[key] - a[key]).max():.3g} at most, {_share(a, b, key):.2g} "
        "of the way that it moved"
    )
    return text + (f"; so do {', '.join(k.tensor for k in alike[1:])}" if alike[1:] else "")


def _causes(a: Trace, b: Trace, alike: Sequence[Key]) -> Iterator[str]:
    """Yield frequent causes of a first difference, in the tensors `alike` of one role."""
    for still, moved, names in ((a, b, "A B"), (b, a, "B A")):
        if tensors := [
            k.tensor for k in alike if k.tensor and _unmoved(still, k) and not _unmoved(moved, k)
        ]:
            unmoved = "they were" if tensors[1:] else "it was"
            yield f"{names[0]} leaves {', '.join(tensors)} as {unmoved}, {names[2]} does not"
    key = alike[0]
    parameters = [k.tensor for k in a if k[:4] == key[:4] and not _is_statistic(k)]
    vector_a, vector_b = (trace.vector(*key[:4], parameters) for trace in (a, b))
    if all(map(_is_statistic, alike)):
        yield (
            "running statistics of batch norm: averaged or kept, their momentum, "
            "evaluation mode in training"
        )
    elif key.role == "samples":
        alike_keys = [k for k in a if k[:2] + k[3:] == key[:2] + key[3:] and k in b]
        same = [sorted(np.concatenate([t[k].ravel() for k in alike_keys]).tolist()) for t in (a, b)]
        ordered = "order of batches: the same samples, shuffled otherwise"
        yield ordered if same[0] == same[1] else "other samples: split, batch size, replacement"
    elif vector_a is None or vector_b is None or vector_a.shape != vector_b.shape:
        yield "another model"
    elif key.role == "loss":
        yield _of_loss(a, b, key)
    elif key.stage in ("in", "end"):
        yield from _of_server(a, key, parameters, vector_a, vector_b)
    else:
        text = _explanation(vector_b - vector_a, _of_client(a, b, key, parameters, vector_a))
        yield text or _OTHERWISE.get(key.role, "another sum of the same steps")


def _is_statistic(key: Key) -> bool:
    return key.tensor.endswith(("running_mean", "running_var"))


def _unmoved(trace: Trace, key: Key) -> bool:
    earlier = trace.earlier(key)
    return (
        earlier is not None
        and earlier.shape == trace[key].shape
        and np.allclose(earlier, trace[key], atol=1e-7)
    )


def _explanation(difference: Array, causes: Mapping[str, Array | None]) -> str:
    """Return the cause with a vector that is nearly parallel to the difference. Its factor replaces
    {}, and its factor plus one {+1}.
    """
    best = _UNEXPLAINED * float(np.linalg.norm(difference))
    text = ""
    for cause, vector in causes.items():
        if (
            vector is not None
            and vector.shape == difference.shape
            and (square := float(vector @ vector)) > 0
        ):
            factor = float(vector @ difference) / square
            remainder = float(np.linalg.norm(difference - factor * vector))
            if remainder < best:
                best = remainder
                text = cause.replace("{}", f"{factor:.3g}").replace("{+1}", f"{1 + factor:.3g}")
    return text


def _of_client(
    a: Trace, b: Trace, key: Key, names: Sequence[str], outcome: Array
) -> dict[str, Array | None]:
    """Return vectors that may explain a difference from the same start, by their cause."""
    number, client, stage, role, _ = key
    sent = a.vector(number, client, "in", "model", names)
    causes = dict[str, Array | None]()
    if role == "before":
        cause = (
            "B starts {+1} times as far from what it is sent (0: a local initialisation is "
            "left out)"
        )
        causes[cause] = None if sent is None else outcome - sent
    elif stage == "out":
        cause = (
            "B sends {+1} times A's: a number of steps or of clients, or a learning rate, "
            "by which it is divided"
        )
        causes[cause] = a.way(number, client, stage, names) if role == "model" else outcome
        if role == "model":
            cause = "{} times the model that it is sent (-1: B sends the difference from it)"
            causes[cause] = sent
    else:
        rate = (
            "the learning rate (of the round, where earlier rounds agree), a sum in place "
            "of a mean, clipping"
        )
        if stage == "0":
            rate += ", Nesterov momentum, whose first step is 1 + momentum times as long"
        causes[f"B's step is {{+1}} times A's: {rate}"] = a.way(number, client, stage, names)
        causes["{} times the weights: weight decay"] = a.vector(
            number, client, stage, "before", names
        )
        causes["{} times the step before: momentum"] = b.way(
            number, client, str(int(stage) - 1), names
        )
    trained = [
        earlier for earlier in a.clients if earlier < number and client in a.clients[earlier]
    ]
    if stage == "0" and trained and (steps := b.steps(trained[-1], client)):
        cause = (
            "{} times the client's last step of an earlier round: momentum is kept between "
            "trainings in B"
        )
        causes[cause] = b.way(trained[-1], client, steps[-1], names)
    for sort in sorted({k.role for k in a if k[:3] == (number, client, "in")} - {"model"}):
        received = a.vector(number, client, "in", sort, names)
        replies = [a.vector(earlier, client, "out", sort, names) for earlier in trained]
        total = np.sum([reply for reply in replies if reply is not None] or [np.zeros(1)], axis=0)
        end = "left out, forgotten, or of another sign or scale"
        causes[f"{{}} times the {sort} that it is sent: {end}"] = received
        causes[f"{{}} times the client's own {sort}: {end}"] = total
        if received is not None and received.shape == total.shape:
            causes[
                f"{{}} times the {sort} that it is sent less its own: a correction that is {end}"
            ] = received - total
    return causes


def _of_loss(a: Trace, b: Trace, key: Key) -> str:
    """Return frequent causes of another loss with the same weights and samples.

    One number is a multiple of every other one. A factor is therefore named only if it is the
    number of samples, or the same for clients whose losses differ.
    """
    losses = np.array(
        [
            (float(a[k].sum()), float(b[k].sum()), a[samples].size if samples in a else 0)
            for client in a.clients[key.round]
            for k in [key._replace(client=client)]
            for samples in [k._replace(role="samples")]
            if k in a and k in b and _same_start(a, b, k)
        ]
    ).reshape(-1, 3)
    here, there, sizes = losses.T
    if len(here) and (sizes > 1).all() and np.allclose(there, sizes * here, rtol=1e-3):
        return "the loss is that of A times the number of samples: a sum in place of a mean"
    difference = there - here
    factor = float(here @ difference) / max(float(here @ here), 1e-300)
    of_factor, of_constant = (
        (float(np.linalg.norm(difference - part)) for part in (factor * here, difference.mean()))
        if len(here) > 1
        else (1.0, 0.0)
    )
    if of_factor < 0.1 * of_constant:
        return (
            f"the loss is {1 + factor:.3g} times A's with the same weights and samples: a "
            "weight of it"
        )
    return _OTHERWISE["loss"]


def _same_start(a: Trace, b: Trace, key: Key) -> bool:
    """Return True if a client's step has the same weights and samples in both traces."""
    own = [k for k in a if k[:3] == key[:3] and k.role in ("before", "samples")]
    return all(k in b and _share(a, b, k) <= 1e-3 for k in own)


def _of_server(
    a: Trace, key: Key, names: Sequence[str], state_a: Array, state_b: Array
) -> Iterator[str]:
    """Yield causes of another state of the server after the same replies, in this round or in the
    one before.
    """
    number = (
        key.round
        if key.stage == "end"
        else max((number for number in a.clients if number < key.round), default=0)
    )
    clients = a.clients.get(number, [])
    start = a.vector(number, clients[0], "in", key.role, names) if clients else None
    if start is None:
        yield (
            "the start: other initial weights, or a state of the server that does not begin with "
            "zeros"
        )
        return
    cause = (
        "the server moves {+1} times as far in B: a rate of the server, a mean over the "
        "clients of the "
        "round, not all, or in the first round Nesterov momentum (1 + momentum)"
    )
    vectors: dict[str, Array | None] = {cause: state_a - start}
    before = max((earlier for earlier in a.clients if earlier < number), default=0)
    if before and a.clients[before]:
        earlier_start = a.vector(before, a.clients[before][0], "in", key.role, names)
        cause = "{} times the server's step of the round before: momentum of the server in B"
        vectors[cause] = None if earlier_start is None else start - earlier_start
    if text := _explanation(state_b - state_a, vectors):
        yield text
    ways = [a.way(number, client, "out", names) for client in clients]
    columns = [way for way in ways if way is not None]
    if key.role == "model" and len(columns) == len(ways):
        shares = [
            np.linalg.lstsq(np.stack(columns, 1), state - start, rcond=None)[0]
            for state in (state_a, state_b)
        ]
        listed = [", ".join(f"{share:.3f}" for share in row) for row in shares]
        yield (
            f"weight of the mean: clients {', '.join(clients)} weigh {listed[0]} in A, "
            f"{listed[1]} in B"
        )
