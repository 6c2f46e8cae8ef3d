"""Building models by name or import path, and the structure of external modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.common.errors import FedloomError, InvalidValue, UnknownName
from fedloom.data import DataSpec
from fedloom.flat.layout import Layout
from fedloom.flat.module import FlatModule
from fedloom.models.structure import block_parameters, head_name
from model_support import make_model, one_line

MNIST = DataSpec((1, 28, 28), 10)
CIFAR = DataSpec((3, 32, 32), 10)
NEWS = DataSpec((200,), 4, 1000)


@pytest.mark.parametrize(
    ("name", "spec", "options", "message"),
    [
        ("logistic", MNIST, {"zero_init": "yes"}, "zero_init must be true or false, not 'yes'"),
        ("mlp", MNIST, {"hidden": 200}, "hidden must be a list, not 200"),
        ("mlp", MNIST, {"hidden": [200, 0]}, "hidden[1] must be at least 1, not 0"),
        ("mlp", MNIST, {"hiden": [200]}, "mlp has no parameter 'hiden': did you mean 'hidden'?"),
        ("feddc_fcn", MNIST, {"hidden": 1.5}, "hidden must be a whole number, not 1.5"),
        ("fasttext", NEWS, {"width": True}, "width must be a whole number, not true"),
        (
            "resnet18",
            CIFAR,
            {"stem": "cifa"},
            "stem must be 'imagenet' or 'cifar', not 'cifa': did you mean 'cifar'?",
        ),
        ("fedmr_cnn", CIFAR, {"variant": 3}, "variant must be 'auto', 'cifar' or 'femnist', not 3"),
        ("fedmr_vgg16", CIFAR, {"dropout": 1.0}, "dropout must be in [0, 1), not 1.0"),
    ],
)
def test_wrong_options_are_named(
    name: str, spec: DataSpec, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        make_model(name, spec, 0, options)
    assert message in one_line(caught.value)
    assert str(caught.value).startswith(name)


def test_an_error_leaves_the_random_state_unchanged() -> None:
    random_state = torch.get_rng_state()
    with pytest.raises(InvalidValue):
        make_model("fedmr_vgg16", MNIST, 0, {"variant": "cifar"})
    assert torch.equal(torch.get_rng_state(), random_state)


NETS = """
import torch
from torch import Tensor, nn

drawn = torch.randn(3)

class Net(nn.Module):
    def __init__(self, spec, width=3):
        super().__init__()
        self.head = nn.Linear(spec.shape[0], width)

def plain(*, features, classes=2):
    return nn.Linear(features, classes)

def refuses(spec):
    raise RuntimeError("too\\nnarrow")

def text(spec):
    return "a model"

number = 3
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write a user module `my_nets` and a broken module into the current directory."""
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "my_broken_nets.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("my_nets", None)


@pytest.mark.usefixtures("nets")
def test_a_model_is_built_from_an_import_path() -> None:
    spec = DataSpec((6,), 2)
    state = torch.get_rng_state()
    net = make_model("my_nets:Net", spec, 5, {"width": 4})
    assert torch.equal(torch.get_rng_state(), state)
    assert net.get_parameter("head.weight").shape == (4, 6)
    repeated = make_model("my_nets:Net", spec, 5, {"width": 4})
    assert torch.equal(net.get_parameter("head.weight"), repeated.get_parameter("head.weight"))
    plain = make_model("my_nets:plain", spec, 5, {"features": 7})
    assert plain.get_parameter("weight").shape == (2, 7)


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("my_nets:", {}, "must be a registered name or 'package.module:callable'"),
        ("no_nets_here:Net", {}, "cannot import 'no_nets_here': ModuleNotFoundError"),
        (
            "my_broken_nets:Net",
            {},
            "cannot import 'my_broken_nets': ModuleNotFoundError: No module named 'no_such",
        ),
        ("my_nets:net", {}, "module 'my_nets' has no 'net': did you mean 'Net'?"),
        ("my_nets:number", {}, "'number' must be a function or class, not int"),
        ("my_nets:text", {}, "must return a torch.nn.Module, not str"),
        ("my_nets:refuses", {}, "RuntimeError: too narrow"),
        ("my_nets:Net", {"wide": 3}, "unexpected keyword argument 'wide'"),
        ("my_nets:Net", {"spec": 3}, "fedloom sets 'spec'. Remove it"),
        ("my_nets:plain", {}, "missing 1 required keyword-only argument: 'features'"),
    ],
)
def test_wrong_import_paths_give_one_line(path: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        make_model(path, DataSpec((6,), 2), 0, options)
    text = one_line(caught.value)
    assert message in text
    assert text.startswith(f"model '{path}")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        make_model("resnet_18", CIFAR, 0, {})
    assert "unknown model 'resnet_18': did you mean 'resnet18'?" in one_line(caught.value)
    assert isinstance(caught.value, FedloomError)


class Tower(nn.Module):
    """A user model with a parameter and a list of submodules called `blocks`, without `head`."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.ReLU())])
        self.classifier = nn.Linear(3, 2)


def test_blocks_and_head_are_found_in_a_module_that_declares_none() -> None:
    tower = Tower()
    assert head_name(tower) == "classifier"
    layers = ("blocks.0", "blocks.1.0", "classifier")
    assert block_parameters(tower) == (
        ("token",),
        *((f"{layer}.weight", f"{layer}.bias") for layer in layers),
    )
    assert head_name(nn.Linear(2, 2)) == ""
    assert block_parameters(nn.Linear(2, 2)) == (("weight", "bias"),)


def test_tied_parameters_are_in_one_block() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    assert block_parameters(module) == (("0.weight", "0.bias"),)
    assert head_name(module) == "1"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ((("0",),), "do not contain the parameter '1.weight'"),
        ((("0",), ("2",)), "name '2', but it has no such submodule"),
    ],
)
def test_wrong_blocks_are_named(declared: tuple[tuple[str, ...], ...], message: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.blocks = declared  # type: ignore[assignment]
    with pytest.raises(InvalidValue) as caught:
        block_parameters(module)
    assert message in one_line(caught.value)


def test_module_without_parameters_has_no_classifier() -> None:
    with pytest.raises(InvalidValue, match="ReLU has no parameters"):
        head_name(nn.ReLU())


def test_a_model_names_its_classifier() -> None:
    class Named(nn.Module):
        head = "first.0"

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 3))
            self.base = nn.Linear(2, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.first(torch.tanh(self.base(inputs)))
            return outputs

    module = Named()
    assert head_name(module) == "first.0"
    layout = Layout(module)
    features, outputs = FlatModule(module, layout).net.both(torch.ones(5, 2))
    torch.testing.assert_close(module.first(features), outputs)
    module.head = "fist.0"
    with pytest.raises(
        InvalidValue,
        match=r"^the head of Named is 'fist.0', but it has no such submodule: did you mean "
        r"'first.0'\?$",
    ):
        head_name(module)
