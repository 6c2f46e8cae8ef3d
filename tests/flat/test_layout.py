"""Layouts convert any module to a row and back without loss."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.common.errors import InvalidValue
from fedloom.flat.layout import Layout
from fedloom.task.making import make_task


class Odd(nn.Module):
    """A module with ties, frozen parameters of several types, doubles, integers and booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.decoder = nn.Linear(5, 7)
        self.decoder.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.brain = nn.Linear(5, 3, dtype=torch.bfloat16).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("wave", torch.randn(2, 3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("scratch", torch.randn(4), persistent=False)
        self.register_buffer("empty", torch.zeros(0))


def everything(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def randomise(module: nn.Module, generator: torch.Generator) -> None:
    for tensor in everything(module).values():
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(
                tensor.dtype
            )
        else:
            tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))


@pytest.mark.parametrize("wide", [False, True])
@torch.no_grad()
def test_every_kind_of_tensor_comes_back_bit_for_bit(wide: bool) -> None:
    source = Odd()
    if wide:
        source.double()
    layout = Layout(source)
    generator = torch.Generator().manual_seed(1)
    randomise(source, generator)
    source.count.fill_(2**40 + 1)  # too large for exact representation in float32
    target = copy.deepcopy(source)
    randomise(target, generator)
    for name, tensor in layout.frozen_tensors(target).items():
        tensor.copy_(everything(source)[name])  # no row contains them
    layout.load(target, layout.flatten(source), layout.flatten_integers(source))
    for name, tensor in everything(source).items():
        assert torch.equal(tensor, everything(target)[name]), name
        assert tensor.dtype == everything(target)[name].dtype
    assert target.decoder.weight is target.embedding.weight
    assert layout.dtype == (torch.float64 if wide else torch.float32)


def test_trainable_parameters_come_first_and_ties_count_once() -> None:
    module = Odd()
    layout = Layout(module)
    trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert layout.trainable == trainable
    row = layout.flatten(module)
    assert torch.equal(
        row[:35],
        torch.cat(
            [module.scalar.detach().reshape(1), module.embedding.weight.detach().reshape(-1)]
        )[:35],
    )
    assert [entry.name for entry in layout.slices if entry.stop <= layout.trainable] == [
        name for name, p in module.named_parameters() if p.requires_grad
    ]
    assert layout.frozen == (
        "frozen.weight",
        "frozen.bias",
        "brain.weight",
        "brain.bias",
        "scratch",
    )
    assert (
        sum(entry.name.endswith("weight") and "decoder" in entry.name for entry in layout.slices)
        == 0
    )


def test_tensors_are_arguments_of_functional_call() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16, 2)
    ).eval()
    layout = Layout(module)
    randomised = copy.deepcopy(module)
    randomise(randomised, torch.Generator().manual_seed(0))
    randomised[1].running_var.abs_()
    inputs = torch.randn(4, 1, 6, 6)
    called = torch.func.functional_call(
        module, layout.tensors(layout.flatten(randomised)), (inputs,)
    )
    assert torch.equal(called, randomised(inputs))


def test_bound_module_trains_the_row_itself() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layout = Layout(module)
    row = layout.flatten(module)
    layout.bind(module, row)
    original = row.clone()
    module(torch.randn(5, 3)).sum().backward()
    with torch.no_grad():
        module[0].weight.add_(1)
    assert torch.equal(row[:12], original[:12] + 1)
    statistics = layout.unit(lambda entry: "running" in entry.name)
    assert not torch.equal(row[statistics[0]], original[statistics[0]])


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "complex64", "float64"])
def test_training_in_mixed_or_complex_numbers_is_refused(kind: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=getattr(torch, kind)))
    name = (
        "0.weight' of the model is float32"
        if kind == "float64"
        else f"1.weight' of the model is {kind}"
    )
    for module_or_layer in (module, module[1]) if kind in ("complex64", "float16") else (module,):
        with pytest.raises(
            InvalidValue, match=name.replace("1.", "" if module_or_layer is module[1] else "1[.]")
        ):
            Layout(module_or_layer)


def test_a_hook_on_a_parameter_is_refused_since_copies_lose_it() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    module[1].weight.register_hook(lambda gradient: 0 * gradient)
    for use in (lambda: Layout(module).shell(module), lambda: make_task("digits", model=module)):
        with pytest.raises(
            InvalidValue, match=r"^parameter '1.weight' of the model has a hook, [^\n]+$"
        ):
            use()


def test_a_row_of_another_length_is_refused() -> None:
    module = nn.Linear(2, 2)
    with pytest.raises(InvalidValue, match=r"must have shape \[6\], got \[7\]"):
        Layout(module).load(module, torch.zeros(7))


def test_a_module_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(InvalidValue, match="Flatten has no trainable parameter"):
        Layout(nn.Flatten())


def test_a_layer_keeps_its_weight_bias_and_statistics_together() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))
    layout = Layout(module)
    assert layout.layers == ("0", "1", "3")
    names = []
    for unit in layout.units("layer"):
        inside = {
            entry.name
            for entry in layout.slices
            for piece in unit
            if piece.start <= entry.start < piece.stop
        }
        names.append(inside)
    assert names == [
        {"0.weight", "0.bias"},
        {"1.weight", "1.bias", "1.running_mean", "1.running_var"},
        {"3.weight", "3.bias"},
    ]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 100))
def test_segments_follow_the_formula(layers: int, percent: int) -> None:
    """Layer j (from 1) is in segment ceil(j / (x N)), computed here with integers."""
    module = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(layers)))
    units = Layout(module).units("segment", percent / 100)
    expected: dict[int, list[int]] = {}
    for j in range(1, layers + 1):
        expected.setdefault(-(-100 * j // (percent * layers)), []).append(j - 1)
    indices = [
        [k for columns in unit for k in range(columns.start, columns.stop)] for unit in units
    ]
    assert indices == [expected[s] for s in sorted(expected)]
    assert len(units) <= math.ceil(100 / percent)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["layer", "tensor", "segment"]), st.floats(0.05, 1.0), st.integers(0, 5))
def test_units_cover_every_number_once(kind: str, fraction: float, depth: int) -> None:
    blocks: list[nn.Module] = []
    for _ in range(depth):
        blocks += [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()]
    layout = Layout(nn.Sequential(*blocks, nn.Linear(3, 2)))
    hits = torch.zeros(layout.size, dtype=torch.int64)
    for unit in layout.units(kind, fraction):  # type: ignore[arg-type]
        for columns in unit:
            hits[columns] += 1
    assert bool((hits == 1).all())


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(InvalidValue, match=r"fraction must be in \(0, 1\]"):
        Layout(nn.Linear(1, 1)).units("segment", fraction)


def test_a_shell_shares_its_tensors_until_it_is_bound() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    layout = Layout(module)
    row_before, integers = layout.flatten(module), layout.flatten_integers(module)
    shell = layout.shell(module).requires_grad_(False)
    for parameter, shell_parameter in zip(module.parameters(), shell.parameters(), strict=True):
        assert parameter.data_ptr() == shell_parameter.data_ptr()
        assert parameter is not shell_parameter
        assert parameter.requires_grad
    row = row_before + 1
    layout.bind(shell, row)
    shell(torch.randn(5, 3))  # batch norm updates its statistics and its counter
    assert torch.equal(layout.flatten(module), row_before)
    assert torch.equal(layout.flatten_integers(module), integers)
    assert torch.equal(layout.flatten_integers(shell), integers + 1)


def test_a_shell_keeps_tied_tensors_tied() -> None:
    module = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    module[1].weight = module[0].weight
    shell = Layout(module).shell(module)
    assert shell[0].weight is shell[1].weight
    assert shell[0].weight is not module[0].weight
