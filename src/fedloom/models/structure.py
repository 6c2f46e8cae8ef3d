"""Where a model's classifier is, and which of its submodules form a block, from bottom to top."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from torch import nn

from fedloom.errors import InvalidValue

# Dotted names of submodules, grouped. A parameter belongs to the longest listed name that its own name continues.
Blocks = tuple[tuple[str, ...], ...]
Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module, shared: Mapping[int, object] = MappingProxyType({})) -> Module:
    """A deep copy of a module; `shared`: what takes the place of some of its tensors, by their ids.

    Parameters are cloned here: when the first one is copied by PyTorch's own code, that imports its compiler, which takes longer
    than the import of PyTorch itself.
    """
    memo = dict(shared)
    for one in module.parameters():
        if type(one) is nn.Parameter and id(one) not in memo:
            memo[id(one)] = nn.Parameter(one.detach().clone(), one.requires_grad)
    return copy.deepcopy(module, memo)


def layer_finder(module: nn.Module) -> Callable[[str], str]:
    """Which layer a tensor of the module belongs to, by its name: the module that owns it.

    A module with the attribute `one_layer = True` is one layer with all modules inside it, and so is every module that carries
    adapters of peft: the factors A and B of a low-rank update mean nothing apart.
    """
    whole = [
        name
        for name, part in module.named_modules()
        if getattr(part, "one_layer", hasattr(part, "adapter_layer_names"))
    ]

    def layer(tensor: str) -> str:
        around = (name for name in whole if not name or tensor.startswith(f"{name}."))
        return next(around, tensor.rpartition(".")[0])

    return layer


def head_name(module: nn.Module) -> str:
    """Dotted name of the classifier: the submodule `head` if there is one, else the last layer that has parameters.

    The name is empty where the model is a single layer. Raises `InvalidValue` for a module without parameters.
    """
    head = getattr(module, "head", None)
    if isinstance(head, nn.Module) and next(head.parameters(), None) is not None:
        return "head"
    owners: list[str] = [
        name for name, owner in module.named_modules() if next(owner.parameters(recurse=False), None) is not None
    ]
    if not owners:
        raise InvalidValue(f"{type(module).__name__} has no parameters, so no classifier")
    return layer_finder(module)(f"{owners[-1]}.weight")


def blocks(module: nn.Module) -> Blocks:
    """Dotted names of submodules from bottom to top, grouped into blocks; every trainable parameter is in exactly one.

    The attribute `blocks` of the module, where that is a tuple of tuples of names (FedALA, table 5: ResNet-18 is
    conv1+bn1 | layer1 | layer2 | layer3 | layer4 | head); else one block for each layer that trains (`layer_finder`).
    Raises `InvalidValue` if the attribute names what is not there, names something twice or leaves a parameter out.
    """
    declared = _declared(module)
    if declared is None:
        return tuple((layer,) for layer in dict.fromkeys(map(layer_finder(module), _trainable(module))))
    kind = type(module).__name__
    present = {name for name, _ in module.named_modules()}
    for name, times in Counter(name for block in declared for name in block).items():
        if name not in present:
            raise InvalidValue(f"the blocks of {kind} name {name!r}, which is no submodule of it")
        if times > 1:
            raise InvalidValue(f"the blocks of {kind} name {name!r} {times} times")
    _assigned(module, declared)
    return declared


def block_parameters(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of the trainable parameters in each of `blocks(module)` that has any, in the order of `named_parameters`; each name
    occurs once."""
    found = blocks(module)
    members: list[list[str]] = [[] for _ in found]
    for name, block in _assigned(module, found).items():
        members[block].append(name)
    return tuple(tuple(names) for names in members if names)


def _trainable(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def _declared(module: nn.Module) -> Blocks | None:
    """The attribute `blocks` if it is a tuple of tuples of names; None otherwise, as for lists of submodules of that name."""
    found = getattr(module, "blocks", None)
    if not isinstance(found, tuple) or not found:
        return None
    if not all(isinstance(block, tuple) and all(isinstance(name, str) for name in block) for block in found):
        return None
    return found


def _assigned(module: nn.Module, grouping: Blocks) -> dict[str, int]:
    """Number of the block that each parameter is in; raises `InvalidValue` for one that is in none."""
    block_of = {name: number for number, block in enumerate(grouping) for name in block}
    assigned: dict[str, int] = {}
    for parameter in _trainable(module):
        owner = parameter.rpartition(".")[0]
        while owner not in block_of and owner:
            owner = owner.rpartition(".")[0]
        if owner not in block_of:
            raise InvalidValue(f"the blocks of {type(module).__name__} leave out the parameter {parameter!r}")
        assigned[parameter] = block_of[owner]
    return assigned
