"""Structure of models: the classifier, and the blocks of submodules from bottom to top."""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedloom.common.errors import InvalidValue, suggestion
from fedloom.common.randomness import preserved_generator

Module = TypeVar("Module", bound=nn.Module)

_REFUSAL = "more than 1 value per channel"
"""Text of PyTorch's error about a batch of one sample."""


def copied(module: Module, shared: Mapping[int, object] = MappingProxyType({})) -> Module:
    """Return a deep copy of a module.

    Args:
        module: The module.
        shared: Replacements for some of its tensors, by their `id`.

    Returns:
        The copy. Tensors with a replacement are shared, all others are new.
    """
    # To copy a parameter, PyTorch imports its compiler, which takes longer than importing PyTorch.
    memo = dict(shared)
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and id(parameter) not in memo:
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    return copy.deepcopy(module, memo)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`.

    Clients train copies of this module, so that names of tensors in files have no prefix of the
    wrapper.
    """
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    while True:
        inner = (
            module.module if isinstance(module, parallel) else getattr(module, "_orig_mod", None)
        )
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def drawn_again(module: Module) -> Module:
    """Return a copy of a module with new initial weights from torch's generator.

    Layers without `reset_parameters` stay unchanged.
    """
    drawn = copied(module)
    for layer in drawn.modules():
        draw = getattr(layer, "reset_parameters", None)
        if callable(draw):
            draw()
    return drawn


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if a layer normalises by the samples of a batch."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def smallest_batch(module: nn.Module, sample: Tensor) -> int:
    """Return the smallest batch with which a module can train.

    Batch norm refuses a batch of one sample if there is one value per channel. Images have more.

    Args:
        module: The module. It is not changed.
        sample: Any sample in the form of the module's input, `[1, ...]`.

    Returns:
        2 if a layer refuses the sample, else 1.
    """
    if not has_batch_norm(module):
        return 1
    trial = copied(module).train()
    with torch.no_grad(), preserved_generator(sample.device):
        try:
            trial(sample)
        except ValueError as error:
            return 2 if _REFUSAL in str(error) else 1
    return 1


def require_untied_layers(module: nn.Module) -> None:
    """Raise `InvalidValue` if two layers have a parameter in common, so that a method cannot treat
    them differently.
    """
    first: dict[int, str] = {}
    layer = layer_finder(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if layer(other) != layer(name):
            remedy = "give each layer its own parameter, or choose a method that treats them alike"
            raise InvalidValue(
                f"{other!r} and {name!r} of {type(module).__name__} are one parameter: {remedy}"
            )


def layer_finder(module: nn.Module) -> Callable[[str], str]:
    """Return a function from a tensor's name to the name of its layer.

    The layer is the module that owns the tensor, or the outermost module around it with an
    attribute `one_layer`.
    """
    # A module with adapters of peft is one layer, since each factor of a low-rank update is
    # meaningless without the other.
    layers = [
        name
        for name, submodule in module.named_modules()
        if getattr(submodule, "one_layer", hasattr(submodule, "adapter_layer_names"))
    ]

    def layer(tensor: str) -> str:
        around = (name for name in layers if not name or tensor.startswith(f"{name}."))
        return next(around, tensor.rpartition(".")[0])

    return layer


def head_name(module: nn.Module) -> str:
    """Return the name of the classifier, or "" for a model with only one layer.

    The attribute `head` can be the submodule or its name (`head = "fc"`). Without it, the topmost
    layer is the classifier.

    Raises:
        InvalidValue: `head` names no submodule, or the module has no parameters.
    """
    head = getattr(module, "head", None)
    if isinstance(head, str):
        names = [name for name, _ in module.named_modules() if name]
        if head not in names:
            raise InvalidValue(
                f"the head of {type(module).__name__} is {head!r}, but it has no such "
                f"submodule{suggestion(head, names)}"
            )
        return head
    if isinstance(head, nn.Module) and next(head.parameters(), None) is not None:
        return "head"
    owners: list[str] = [
        name
        for name, owner in module.named_modules()
        if next(owner.parameters(recurse=False), None) is not None
    ]
    if not owners:
        raise InvalidValue(f"{type(module).__name__} has no parameters, so it has no classifier")
    return layer_finder(module)(f"{owners[-1]}.weight")


def block_parameters(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of the trainable parameters of each block, from bottom to top; blocks
    without any are skipped.

    The module's attribute `blocks` lists tuples of dotted names of submodules. A parameter belongs
    to the longest of these names that is a prefix. Without the attribute, each layer is a block.

    Args:
        module: The architecture.

    Returns:
        Names of parameters, one tuple for each block.

    Raises:
        InvalidValue: `blocks` names an unknown submodule, or leaves out a trainable parameter.
    """
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    declared = getattr(module, "blocks", None)
    if not isinstance(declared, tuple):  # a list of submodules can also have this name
        layer = layer_finder(module)
        declared = tuple((name,) for name in dict.fromkeys(map(layer, trainable)))
    kind = type(module).__name__
    present = {name for name, _ in module.named_modules()}
    block_of = {name: number for number, block in enumerate(declared) for name in block}
    if unknown := block_of.keys() - present:
        raise InvalidValue(
            f"the blocks of {kind} name {min(unknown)!r}, but it has no such submodule"
        )
    members: list[list[str]] = [[] for _ in declared]
    for parameter in trainable:
        owner = parameter.rpartition(".")[0]
        while owner not in block_of and owner:
            owner = owner.rpartition(".")[0]
        if owner not in block_of:
            raise InvalidValue(
                f"the blocks of {kind} do not contain the parameter {parameter!r}: "
                "every trainable parameter needs a block"
            )
        members[block_of[owner]].append(parameter)
    return tuple(tuple(names) for names in members if names)
