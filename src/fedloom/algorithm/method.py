"""Base class of everything that an expression can name: algorithms, parts and stages."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal, dataclass_transform, get_args

from torch import Tensor

from fedloom.algorithm.records import Plan
from fedloom.common.expression import show
from fedloom.common.fields import parameters, require_fields, type_hints
from fedloom.common.registry import Registry


@dataclass(frozen=True)
class Facts:
    """Requirements and guarantees of an algorithm or part, checked when a pipeline is built.

    Attributes:
        one_download: All clients receive the same model, so a part can change where training
            starts.
        one_model_each: Every selected client receives its own model, by its slot.
        fixed_participants: Every round needs the same number of clients.
        averages: The server needs only the mean of the replies, or an estimate of it.
        anonymous: The server treats all replies alike: it needs neither the client nor the weight.
        stackable: The client half treats every row separately, so clients may train together.
        fits_once: Clients read their data only by one plain `Cohort.fit` in a round.
        needs_total_rounds: A value depends on `round.rounds`, so a run cannot be lengthened later.
        deploys: The model that a client uses: the received model (`received`), a model made from it
            (`start`), or a model from its memory only (`memory`). None: `start` for algorithms that
            override `deploy`, `personalise` or `complete`, else `received`.
        initial: The slices of the initial model that a client needs when it first takes part:
            nothing (`none`), the slices that do not travel (`private`) or the whole model (`all`).
            Later stages send it.
        independent: Of a sampler: each client participates as in a uniform draw.
        foreseeable: Of a sampler: the next selection does not depend on this round's replies.
        needs_every_reply: No reply may replace another one, as with over-selection.
    """

    one_download: bool = True
    one_model_each: bool = False
    fixed_participants: bool = False
    averages: bool = True
    anonymous: bool = False
    stackable: bool = True
    fits_once: bool = True
    needs_total_rounds: bool = False
    deploys: Literal["received", "start", "memory"] | None = None
    initial: Literal["none", "private", "all"] = "none"
    independent: bool = True
    foreseeable: bool = True
    needs_every_reply: bool = False


@dataclass_transform(field_specifiers=(field,))
class Method:
    """Base class of everything that an expression can name.

    Subclasses become dataclasses automatically. Their fields are the hyper-parameters, and the
    types of the fields declare the allowed values: `mu: NonNegative = 0.01`.

    A checkpoint saves `state`, named tensors. They are replaced and never edited in place, so that
    a failed round can be undone at no cost.
    """

    state: dict[str, Tensor]
    plan: Plan
    facts: ClassVar[Any] = Facts()
    needs: ClassVar[tuple[Callable[[str, Plan], None], ...]] = ()
    """Checks of the plan. They receive the name of the method and raise `InvalidValue`."""
    client_figures: ClassVar[tuple[str, ...]] = ()
    """Names that clients write to `cohort.metrics`."""

    def __init_subclass__(cls) -> None:
        """Make the subclass a dataclass. A second `@dataclass` above it changes nothing."""
        defaults = {name: value for name, value in vars(cls).items() if isinstance(value, Field)}
        if not is_dataclass(cls) or vars(cls).get("__annotations__"):
            dataclass(cls)
        for name, value in defaults.items():
            setattr(cls, name, value)

    def __post_init__(self) -> None:
        """Check the hyper-parameters against the types of their fields."""
        require_fields(self)

    def __str__(self) -> str:
        """Return an expression that builds an equal method."""
        texts = []
        for position, (name, parameter) in enumerate(parameters(type(self)).items()):
            value = getattr(self, name)
            needed = parameter.default is parameter.empty
            if isinstance(value, Method) and (
                needed or (value != parameter.default and not position)
            ):
                texts.append(show(value))
            elif needed or value != parameter.default:
                texts.append(f"{name}={show(value)}")
        name = name_of(self) if algorithms.of(type(self)) else type(self).__name__.lower()
        return f"{name}({', '.join(texts)})" if texts else name

    def diagnose(self) -> dict[str, float]:
        """Return figures about the server's state, recorded at evaluations."""
        return {}

    def _require_plan(self, plan: Plan) -> None:
        """Check and store the plan."""
        for require in self.needs:
            require(name_of(self), plan)
        self.plan = plan

    def _inner(self) -> "list[Method]":
        """Return the methods in the fields of this one."""
        entries = fields(self)  # type: ignore[arg-type]
        values = (getattr(self, entry.name, None) for entry in entries)
        return [value for value in values if isinstance(value, Method)]

    def _leading(self) -> "list[tuple[int, Method]]":
        """Return the inner methods that have a state now, with their positions."""
        return list(enumerate(self._inner()))


def components(method: Method) -> Iterator[Method]:
    """Yield a method and all methods inside it, outermost first."""
    yield method
    for inner in method._inner():
        yield from components(inner)


def state_of(method: Method) -> dict[str, Tensor]:
    """Return the state of a method and of the methods inside it, by path."""
    full = dict(method.state)
    for k, inner in method._leading():
        full |= {f"inner{k}.{name}": tensor for name, tensor in state_of(inner).items()}
    return full


def restore_state(method: Method, full: Mapping[str, Tensor]) -> None:
    """Restore the states that `state_of` returned.

    Args:
        method: A method with the same inner methods as the one that was saved. Its states are
            replaced.
        full: Tensors by path: `model`, or `inner0.model` for the first inner method.
    """
    method.state = {name: tensor for name, tensor in full.items() if "." not in name}
    for k, inner in method._leading():
        prefix = f"inner{k}."
        names = [name for name in full if name.startswith(prefix)]
        restore_state(inner, {name.removeprefix(prefix): full[name] for name in names})


algorithms: Registry[type[Method]] = Registry("algorithm", "fedloom.algorithms", "fedloom.parts")
"""Methods by name. A method registers itself: `@algorithms.register("fedavg")`."""


def method_fields(kind: Any) -> set[str]:
    """Return the names of the fields of a class of methods that hold other methods."""
    hints = type_hints(kind)
    return {name for name, hint in hints.items() if any(map(_is_method, (hint, *get_args(hint))))}


def _is_method(kind: Any) -> bool:
    if isinstance(kind, type):
        return issubclass(kind, Method)
    return any(map(_is_method, get_args(kind)))


def name_of(method: Method) -> str:
    """Return the name under which a method is registered, or the name of its class."""
    entry = algorithms.of(type(method))
    return type(method).__name__ if entry is None else entry.name


def needs_total_rounds(method: Method) -> bool:
    """Return True if a run of the method cannot be lengthened later."""
    return any(component.facts.needs_total_rounds for component in components(method))
