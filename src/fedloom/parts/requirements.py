"""Checks that parts fit algorithms and each other: one table of requirements, and the rules for
pairs of parts.
"""

from collections.abc import Callable
from itertools import pairwise

from fedloom.algorithm import Algorithm, as_spec, overrides
from fedloom.algorithm.method import Method, components, name_of
from fedloom.common.errors import InvalidValue
from fedloom.parts.hooks import Part, parts_of
from fedloom.parts.pipeline import Pipeline
from fedloom.parts.stale_updates import UsesStaleUpdates

Requirement = Callable[[Pipeline], str]
"""Returns the reason why a pipeline does not meet it, or "". {0} is replaced by the algorithm."""


def _one_download(pipeline: Pipeline) -> str:
    return (
        "" if pipeline.algorithm.facts.one_download else "clients of {0} do not receive one model"
    )


def _sends_model(pipeline: Pipeline) -> str:
    sent = pipeline.algorithm.send(pipeline.plan.opening())
    return "" if "model" in sent else "clients of {0} do not receive one model"


def _one_update(pipeline: Pipeline) -> str:
    opening = pipeline.plan.opening()
    algorithm = pipeline.algorithm
    refusal = "clients of {0} do not return an update of one received model"
    expected = algorithm.expects(opening).get("model")
    sent = algorithm.send(opening).get("model")
    if expected is None or sent is None:
        return refusal
    alike = tuple(sent.shape[1:]) == as_spec(expected, pipeline.plan.layout).shape
    return "" if alike else refusal


def _whole_model(pipeline: Pipeline) -> str:
    if exchanges_models(pipeline):
        return ""
    return "clients of {0} do not exchange one whole model"


def _returns_whole_model(pipeline: Pipeline) -> str:
    return (
        ""
        if pipeline.returns_whole(pipeline.plan.opening())
        else "clients of {0} do not return whole models"
    )


def _only_the_model(pipeline: Pipeline) -> str:
    extra = sorted(pipeline.expected_names(pipeline.plan.opening()) - {"model"})
    return f"clients of {{0}} also upload {extra[0]!r}, which would leak" if extra else ""


def _no_integers(pipeline: Pipeline) -> str:
    if pipeline.plan.layout.integers:
        return "batch norm counts batches, and the counter would leak. Use group norm instead"
    return ""


def _no_buffers(pipeline: Pipeline) -> str:
    layout = pipeline.plan.layout
    buffers = [entry.name for entry in layout.slices if entry.start >= layout.trainable]
    if not buffers:
        return ""
    remedy = "use a layer without one, or register it with persistent=False if it is constant"
    return f"the model's buffer {buffers[0]!r} would be uploaded without noise: {remedy}"


def _averages(pipeline: Pipeline) -> str:
    if pipeline.algorithm.facts.averages:
        return ""
    return "{0} needs each reply, not only an estimate of their mean"


def _one_model_for_all(pipeline: Pipeline) -> str:
    if pipeline.algorithm.facts.one_model_each:
        return "{0} sends each client a different model, which depends on the other clients"
    return ""


def _one_fit(pipeline: Pipeline) -> str:
    for method in pipeline.components():
        if not method.facts.fits_once:
            name = name_of(method)
            return (
                f"clients of {name} use their samples for more than one local training, "
                "which epsilon does not count"
            )
    return ""


def _anonymous(pipeline: Pipeline) -> str:
    estimates = any(part.facts.anonymous for part in pipeline.acting["rewrite"])
    if pipeline.algorithm.facts.anonymous or estimates:
        return ""
    hint = ": set weighted=false" if getattr(pipeline.algorithm, "weighted", False) else ""
    return f"{{0}} needs the client of each upload, which the exchange hides{hint}"


def _averages_only(pipeline: Pipeline) -> str:
    """Stale replies fit only algorithms that do nothing except average whole models."""
    opening = pipeline.plan.opening()
    algorithm = pipeline.algorithm
    exchanges = algorithm.send(opening).keys() == {"model"} == pipeline.expected_names(opening)
    one_model = not algorithm.facts.one_model_each and exchanges_models(pipeline)
    if exchanges and one_model and algorithm.facts.averages:
        return ""
    return "{0} does more than average whole models, so it does not accept stale replies"


def _no_server_step(pipeline: Pipeline) -> str:
    if overrides(type(pipeline.algorithm), Algorithm, ("update", "receive", "model")):
        return "{0} needs a server, but nodes mix their models without one"
    return ""


def _common_messages(pipeline: Pipeline) -> str:
    message = pipeline.algorithm.send(pipeline.plan.opening())
    addressed = sorted(name for name, rows in message.items() if name != "model" and len(rows) > 1)
    if addressed:
        return (
            f"each client of {{0}} receives a different {addressed[0]!r}, "
            "which does not exist for idle clients"
        )
    return ""


FACTS: dict[str, Requirement] = {
    "one download": _one_download,
    "averages": _averages,
    "one model for all": _one_model_for_all,
    "one fit": _one_fit,
    "anonymous": _anonymous,
    "no server step": _no_server_step,
}
"""Requirements on facts, by the names in `Part.requires`."""

REQUIREMENTS: dict[str, Requirement] = {
    "one download": _sends_model,
    "one update": _one_update,
    "whole models": _whole_model,
    "whole replies": _returns_whole_model,
    "only the model": _only_the_model,
    "no integers": _no_integers,
    "no buffers": _no_buffers,
    "only averages": _averages_only,
    "common messages": _common_messages,
}
"""Requirements that need the plan of a run, by the names in `Part.requires`."""


def exchanges_models(pipeline: Pipeline) -> bool:
    """Return True if clients receive a whole model and return one."""
    opening = pipeline.plan.opening()
    size = pipeline.plan.layout.size
    sent = pipeline.algorithm.send(opening).get("model")
    return sent is not None and tuple(sent.shape[1:]) == (size,) and pipeline.returns_whole(opening)


def require_facts(pipeline: Pipeline) -> None:
    """Raise `InvalidValue` unless the parts of a pipeline fit the algorithm and each other.

    This needs no plan, so an expression can be refused before a run begins.
    """
    for rule in _RULES:
        rule(pipeline)
    _require(pipeline, FACTS)


def require_combination(pipeline: Pipeline) -> None:
    """Raise `InvalidValue` unless the parts of a pipeline fit the plan of its algorithm."""
    for part in pipeline.parts:
        if pipeline.plan.poisson and not (part.facts.independent or part.facts.fixed_participants):
            raise InvalidValue(
                f"{name_of(part)} selects clients, but participation_mode = poisson selects them "
                "independently at random"
            )
    _require(pipeline, REQUIREMENTS)


def _require(pipeline: Pipeline, requirements: dict[str, Requirement]) -> None:
    for part in reversed(pipeline.parts):
        for name in (name for name in part.requires if name in requirements):
            if reason := requirements[name](pipeline):
                raise InvalidValue(
                    f"{name_of(part)}: {reason.format(pipeline.algorithm)}{part.hint}"
                )


def require_stages(method: Method, pipelines: list[Pipeline]) -> None:
    """Raise `InvalidValue` unless the stages of an expression fit together and the parts around
    them.

    Args:
        method: The whole expression.
        pipelines: The pipeline of each stage.
    """
    if len(pipelines) == 1:
        return
    for pipeline in pipelines:
        for part in pipeline.acting["close"]:
            raise InvalidValue(
                f"{part} decides when clients train, so it cannot be inside or around stages"
            )
    for part in parts_of(method):
        name = name_of(part)
        covers_all = len(_containing(part, pipelines)) == len(pipelines)
        if getattr(part, "counts_privacy", False) and not covers_all:
            raise InvalidValue(
                f"{name}: the other stages would have no privacy. Put {name} around stages"
            )


def require_units(method: Method, pipelines: list[Pipeline]) -> None:
    """Raise `InvalidValue` unless clients exchange the same units in all stages inside one
    exchange.

    Args:
        method: The whole expression.
        pipelines: The pipeline of each stage.
    """
    for part in (part for part in parts_of(method) if "exchange" in part.hooks()):
        around = _containing(part, pipelines)
        if any(pipeline.algorithm.units() != around[0].algorithm.units() for pipeline in around):
            remedy = "put secure around each stage"
            raise InvalidValue(
                f"{name_of(part)}: the stages of {part.method} move different units; {remedy}"
            )


def _containing(part: Part, pipelines: list[Pipeline]) -> list[Pipeline]:
    """Return the pipelines that contain this part object."""
    return [pipeline for pipeline in pipelines if any(part is other for other in pipeline.parts)]


# --- rules for pairs of parts ---


def _no_part_twice(pipeline: Pipeline) -> None:
    for k, part in enumerate(pipeline.parts):
        for other in pipeline.parts[k + 1 :]:
            if part.once and (isinstance(other, type(part)) or isinstance(part, type(other))):
                raise InvalidValue(
                    f"{name_of(part)}({part.method}): {name_of(other)} is allowed only once"
                )


def _one_estimate_of_absent_clients(pipeline: Pipeline) -> None:
    parts = [part for part in pipeline.parts if isinstance(part, UsesStaleUpdates)]
    if len(parts) > 1:
        raise InvalidValue(
            f"{name_of(parts[0])}: {parts[1]} already uses the last updates of absent clients"
        )


def _one_sampler(pipeline: Pipeline) -> None:
    samplers = [part for part in pipeline.parts if not part.facts.independent]
    if len(samplers) > 1:
        raise InvalidValue(f"{name_of(samplers[0])}: {samplers[1]} already selects the clients")


def _closing_is_outermost(pipeline: Pipeline) -> None:
    for part in pipeline.acting["close"]:
        position = _position(pipeline, part)
        changing = {"select", "poll", "move", "exchange", "release", "observe", "close"}
        for k, other in enumerate(pipeline.parts):
            rewrites = k < position and "rewrite" in other.hooks()
            if other is not part and (rewrites or other.hooks() & changing):
                reason = (
                    "decides when clients train, so no other part may change the clients of a round"
                )
                raise InvalidValue(f"{part} {reason}: remove {name_of(other)}")


def _codes(pipeline: Pipeline) -> None:
    coders = pipeline.acting["coded"]
    for outer, inner in pairwise(coders):
        if not getattr(outer, "recodes", False):
            raise InvalidValue(
                f"{name_of(outer)}: {inner} already codes uploads. Only quantised can be around it"
            )
    exchanging = pipeline.acting["exchange"]
    if coders and exchanging:
        reason = f"clients of {exchanging[0]} upload layers of other clients instead of updates"
        raise InvalidValue(f"{name_of(coders[0])}: {reason}")


def _exchange_hides_names(pipeline: Pipeline) -> None:
    for part in pipeline.acting["exchange"]:
        for other in pipeline.parts:
            reads = other.hooks() & {"observe", "rewrite"}
            if reads and not other.facts.anonymous:
                reason = f"{other} needs the client of each upload, which the exchange hides"
                raise InvalidValue(f"{name_of(part)}: {reason}")


def _privacy(pipeline: Pipeline) -> None:
    accounts = [part for part in pipeline.parts if getattr(part, "counts_privacy", False)]
    if len(accounts) > 1:
        outer = name_of(accounts[0])
        inner = name_of(accounts[1])
        raise InvalidValue(f"{outer}: {inner} counts a separate epsilon. Use only one of them")
    for part in accounts:
        for poll in pipeline.acting["poll"]:
            raise InvalidValue(
                f"{name_of(poll)}: clients would return losses without the privacy of {part}"
            )
        for other in pipeline.parts:
            if other.reveals:
                reason = f"clients would upload {other.reveals} without the privacy of {part}"
                raise InvalidValue(f"{name_of(other)}: {reason}")


def _release_is_outermost(pipeline: Pipeline) -> None:
    for part in pipeline.acting["release"]:
        for other in pipeline.parts:
            if "exchange" in other.hooks():
                reason = f"in {other} an upload contains unclipped layers of several clients"
                raise InvalidValue(f"{name_of(part)}: {reason}")
            if not other.facts.independent:
                reason = f"{other} selects clients by its own rule, which epsilon does not count"
                raise InvalidValue(f"{name_of(part)}: {reason}")
        for other in pipeline.parts[: _position(pipeline, part)]:
            if other.hooks() & {"rewrite", "observe"}:
                name = name_of(other)
                remedy = f"put {name_of(part)} around {name}"
                raise InvalidValue(
                    f"{name_of(part)}: {name} would change the replies before the sum or after the "
                    f"release: {remedy}"
                )


def _mixing_is_the_only_step(pipeline: Pipeline) -> None:
    for part in pipeline.acting["mix"]:
        for other in pipeline.parts:
            if other.hooks() & {"rewrite", "release", "close", "exchange", "coded"}:
                reason = (
                    f"nodes mix their models without a server, so {name_of(other)} has no effect"
                )
                raise InvalidValue(f"{name_of(part)}: {reason}")


def _position(pipeline: Pipeline, part: Part) -> int:
    return next(k for k, other in enumerate(pipeline.parts) if other is part)


_RULES = (
    _no_part_twice,
    _one_estimate_of_absent_clients,
    _one_sampler,
    _closing_is_outermost,
    _codes,
    _exchange_hides_names,
    _privacy,
    _release_is_outermost,
    _mixing_is_the_only_step,
)


def _closes(method: Method) -> bool:
    return isinstance(method, Part) and "close" in method.hooks()


def require_participation(method: Method, poisson: bool, over_selected: bool) -> None:
    """Raise `InvalidValue` unless a method accepts a varying number of clients or replies.

    Args:
        method: The expression.
        poisson: Clients take part independently at random.
        over_selected: The clock drops the last replies of a round.
    """
    if not (poisson or over_selected):
        return
    inside_first = reversed(list(components(method)))
    for component in sorted(inside_first, key=lambda component: not _closes(component)):
        if component.facts.fixed_participants:
            draws = "participation_mode = poisson draws a different number of clients in each round"
            drops = "clock.over_selection drops the last replies of every round"
            needs = "needs the same number of clients in each round, and all replies"
            needs = "decides which replies it uses" if _closes(component) else needs
            raise InvalidValue(f"{draws if poisson else drops}, but {component} {needs}")
        if over_selected and component.facts.needs_every_reply:
            reason = "takes the first replies of a round, so another client replaces a missing one"
            raise InvalidValue(
                f"clock.over_selection {reason}. The epsilon of {component} does not count this: "
                "remove over_selection"
            )
