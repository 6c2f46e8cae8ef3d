"""The models of the papers.

Tests the printed sizes, forward passes, stacking, structure and construction by name or path.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from fedloom.common.errors import InvalidValue
from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.resnet import BasicBlock
from fedloom.models.structure import block_parameters, head_name
from model_support import make_model, one_line

DIGITS = DataSpec((1, 8, 8), 10)
MNIST = DataSpec((1, 28, 28), 10)
FEMNIST = DataSpec((1, 28, 28), 62)
CIFAR = DataSpec((3, 32, 32), 10)
CIFAR100 = DataSpec((3, 32, 32), 100)
TINY = DataSpec((3, 64, 64), 200)
NEWS = DataSpec((200,), 4, 98_635)


@dataclass(frozen=True)
class Case:
    """A model and its data, with the numbers of parameters and of state dictionary keys."""

    name: str
    spec: DataSpec
    parameters: int
    keys: int
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        size = "x".join(map(str, self.spec.shape))
        return "-".join([self.name, size, str(self.spec.outputs), *map(str, self.options.values())])


CASES = [
    Case("logistic", MNIST, 7_850, 2),
    Case("mlp", DIGITS, 55_210, 6),
    Case("mlp", DIGITS, 64 * 30 + 30 + 30 * 10 + 10, 4, {"hidden": [30]}),
    Case("projected", DIGITS, 53_200 + (200 + 256) * 200 + 456 + 2_570, 10),
    Case("mcmahan_2nn", MNIST, 199_210, 6),
    Case("feddc_fcn", MNIST, 199_210, 6),
    Case("feddc_fcn", MNIST, 89_610, 6, {"hidden": 100}),
    Case("digits_cnn", DIGITS, 13_706, 8),
    Case("mcmahan_cnn", MNIST, 1_663_370, 8),
    Case("mcmahan_cnn", CIFAR, 2_156_490, 8),
    Case("cnn4", MNIST, 582_026, 8),
    Case("cnn4", CIFAR, 878_538, 8),
    Case("cnn4", TINY, 5_694_600, 8),
    Case("fedmr_cnn", CIFAR, 62_006, 10),
    Case("fedmr_cnn", FEMNIST, 160_510, 8),
    Case("feddc_cnn", CIFAR, 797_962, 10),
    Case("feddc_cnn", CIFAR100, 815_332, 10),
    Case("fedmr_resnet20", CIFAR, 219_482, 119),
    Case("fedmr_resnet20", FEMNIST, 219_482 - 2 * 144 + 52 * 257, 119),
    Case("resnet20", CIFAR, 269_722, 116),
    Case("resnet18", TINY, 11_176_512 + 200 * 513, 122),
    Case("resnet18", CIFAR, 11_181_642, 122, {"stem": "imagenet"}),
    Case("resnet18", CIFAR, 11_173_962, 122, {"stem": "cifar"}),
    Case("fedmr_vgg16", CIFAR, 33_646_666, 97),
    Case("fedmr_vgg16", FEMNIST, 8_024_958, 14),
    Case("fasttext", NEWS, 3_157_508, 5),
]
HEAVY = 10_000_000  # most tests skip cases with more parameters
every_case = pytest.mark.parametrize("case", CASES, ids=str)
light_case = pytest.mark.parametrize(
    "case", [case for case in CASES if case.parameters < HEAVY], ids=str
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.lru_cache(maxsize=4)
def built(case: Case) -> nn.Module:
    """Return the model at seed 0.

    All tests that do not modify it share the same object.
    """
    return make_model(case.name, case.spec, 0, case.options)


def batch(spec: DataSpec, size: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if spec.vocabulary is not None:
        return torch.randint(spec.vocabulary, (size, *spec.shape), generator=generator)
    return torch.randn((size, *spec.shape), generator=generator)


def test_every_registered_model_has_a_case_and_a_summary() -> None:
    elsewhere = {"transformer", "causal_lm", "recurrent"}  # test_language.py, test_next_token.py
    assert {case.name for case in CASES} | elsewhere == {entry.name for entry in models}
    assert all(entry.summary.endswith(".") and len(entry.summary) <= 120 for entry in models)


@every_case
def test_size_is_as_the_papers_print_it(case: Case) -> None:
    module = built(case)
    assert sum(parameter.numel() for parameter in module.parameters()) == case.parameters
    assert len(module.state_dict()) == case.keys


@every_case
def test_head_is_applied_last_to_the_features(case: Case) -> None:
    module = built(case).eval()
    head = module.get_submodule(head_name(module))
    features: list[Tensor] = []
    handle = head.register_forward_hook(lambda _, inputs, __: features.append(inputs[0]))
    with torch.no_grad():
        logits = module(batch(case.spec))
        handle.remove()
        assert len(features) == 1
        assert torch.equal(head(features[0]), logits)
    assert head_name(module) == "head"
    assert isinstance(head, nn.Linear)
    assert logits.shape == (2, case.spec.outputs)
    assert features[0].shape == (2, head.in_features)


@light_case
def test_gradient_reaches_every_parameter(case: Case) -> None:
    module = copy.deepcopy(built(case)).eval()
    F.cross_entropy(module(batch(case.spec, 4)), torch.arange(4)).backward()  # type: ignore[no-untyped-call]
    unreached = {
        name for name, p in module.named_parameters() if p.grad is None or not p.grad.any()
    }
    # FedMR's code has an unused batch norm.
    assert unreached == ({"bn.weight", "bn.bias"} if case.name == "fedmr_resnet20" else set())


@light_case
def test_seed_alone_decides_the_initial_weights(case: Case) -> None:
    torch.manual_seed(1)
    random_state = torch.get_rng_state()
    repeated = make_model(case.name, case.spec, 0, case.options)
    assert torch.equal(torch.get_rng_state(), random_state)
    other_seed = make_model(case.name, case.spec, 1, case.options)
    for name, value in built(case).state_dict().items():
        assert torch.equal(value, repeated.state_dict()[name]), name
    assert not torch.equal(
        repeated.get_parameter("head.weight"), other_seed.get_parameter("head.weight")
    )


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name != "resnet18" or case.options], ids=str
)
def test_stacked_models_equal_each_model_alone(case: Case) -> None:
    pair = [make_model(case.name, case.spec, seed, case.options).eval() for seed in (3, 4)]
    inputs = torch.stack([batch(case.spec), batch(case.spec).flip(0)])
    state = stack_module_state(pair)
    with torch.no_grad():
        stacked = vmap(lambda p, b, x: functional_call(pair[0], (p, b), (x,)))(*state, inputs)
        separate = torch.stack([module(x) for module, x in zip(pair, inputs, strict=True)])
    torch.testing.assert_close(stacked, separate, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedmr_resnet20", "resnet20"])
def test_stacked_batch_norm_trains_as_each_model_alone(name: str) -> None:
    spec = DataSpec((3, 16, 16), 10)
    pair = [make_model(name, spec, seed, {}).train() for seed in (3, 4)]
    inputs = torch.stack([batch(spec, 4), batch(spec, 4).flip(0) + 1])
    parameters, buffers = stack_module_state(pair)
    separate = torch.stack(
        [copy.deepcopy(module)(x) for module, x in zip(pair, inputs, strict=True)]
    )
    stacked = vmap(lambda p, b, x: functional_call(pair[0], (p, b), (x,)))(
        parameters, buffers, inputs
    )
    torch.testing.assert_close(stacked, separate, rtol=1e-4, atol=1e-4)
    for module, x in zip(pair, inputs, strict=True):
        module(x)
    for key, value in buffers.items():
        expected = torch.stack([dict(module.named_buffers())[key] for module in pair])
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5, msg=key)


@every_case
def test_blocks_hold_every_parameter_once(case: Case) -> None:
    module = built(case)
    assert all(name.startswith("head.") for name in block_parameters(module)[-1])
    assert [name for block in block_parameters(module) for name in block] == [
        n for n, _ in module.named_parameters()
    ]


def test_blocks_are_those_of_the_tables() -> None:
    tables: dict[str, tuple[DataSpec, list[tuple[str, ...]]]] = {
        "resnet18": (
            TINY,
            [("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",), ("layer4",), ("head",)],
        ),
        "cnn4": (MNIST, [("conv1",), ("conv2",), ("fc",), ("head",)]),
        "fasttext": (NEWS, [("embedding",), ("hidden",), ("head",)]),
    }
    for name, (spec, expected) in tables.items():
        for names, block in zip(
            block_parameters(make_model(name, spec, 0, {})), expected, strict=True
        ):
            assert {name.partition(".")[0] for name in names} == set(block)


def test_upper_blocks_have_the_sizes_of_fedalas_table_6() -> None:
    expected = {"cnn4": [582_026, 581_194, 529_930, 5_130], "fasttext": [3_157_508, 1_188, 132]}
    for name, counts in expected.items():
        module = make_model(name, NEWS if name == "fasttext" else MNIST, 0, {})
        size = [
            sum(module.get_parameter(p).numel() for p in block)
            for block in block_parameters(module)
        ]
        assert [sum(size[i:]) for i in range(len(size))] == counts


FLATTENING = {"logistic", "mlp", "mcmahan_2nn", "feddc_fcn"}
OTHER = {"fasttext", "projected"}  # for tokens; for the data of its inner model
IMAGE_MODELS = sorted({case.name for case in CASES} - FLATTENING - OTHER)


@pytest.mark.parametrize("name", sorted({case.name for case in CASES} - OTHER))
def test_tokens_fit_no_other_model(name: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        make_model(name, NEWS, 0, {})
    text = one_line(caught.value)
    assert text.startswith(f"{name} needs ")
    assert text.endswith("not tokens of shape (200,)")


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_image_models_refuse_flat_features(name: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        make_model(name, DataSpec((30,), 5), 0, {})
    assert (
        one_line(caught.value)
        == f"{name} needs images (channels, height, width), not features of shape (30,)"
    )


def test_fasttext_refuses_images_and_features() -> None:
    for spec in (MNIST, DataSpec((30,), 5)):
        with pytest.raises(InvalidValue) as caught:
            make_model("fasttext", spec, 0, {})
        assert "fasttext needs tokens (length,) with a vocabulary" in one_line(caught.value)
        assert str(spec.shape) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "least", "options"),
    [
        ("digits_cnn", 4, {}),
        ("mcmahan_cnn", 4, {}),
        ("cnn4", 16, {}),
        ("feddc_cnn", 16, {}),
        ("fedmr_cnn", 16, {"variant": "cifar"}),
        ("fedmr_cnn", 16, {"variant": "femnist"}),
        ("fedmr_resnet20", 1, {}),
        ("resnet20", 1, {}),
        ("resnet18", 1, {}),
        ("fedmr_vgg16", 2, {"variant": "femnist"}),
        ("fedmr_vgg16", 32, {"variant": "cifar"}),
    ],
)
def test_smallest_image_works_and_a_smaller_one_is_refused(
    name: str, least: int, options: dict[str, Any]
) -> None:
    spec = DataSpec((2, least, least + 3), 3)
    with torch.no_grad():
        assert make_model(name, spec, 0, options).eval()(batch(spec)).shape == (2, 3)
    if least == 1:
        return
    with pytest.raises(InvalidValue) as caught:
        make_model(name, DataSpec((2, least + 3, least - 1), 3), 0, options)
    expected = (
        f"{name} needs images of at least {least}x{least} pixels, not images of shape "
        f"(2, {least + 3}, {least - 1})"
    )
    assert one_line(caught.value) == expected


def test_zero_init_starts_with_equal_logits() -> None:
    module = make_model("logistic", MNIST, 0, {"zero_init": True})
    assert not module(batch(MNIST)).any()


def test_convolutions_pass_through_relu_then_maximum() -> None:
    """The layer order is the one in the papers: convolution, ReLU, pooling, linear."""
    module = make_model("fedmr_cnn", CIFAR, 0, {})
    x = batch(CIFAR)
    expected = x
    for name in ("conv1", "conv2"):
        expected = nn.MaxPool2d(2)(nn.ReLU()(module.get_submodule(name)(expected)))
    for name in ("fc1", "fc2"):
        expected = nn.ReLU()(module.get_submodule(name)(expected.reshape(2, -1)))
    torch.testing.assert_close(module(x), module.get_submodule("head")(expected))


def test_parameter_free_shortcut_skips_pixels_and_adds_empty_channels() -> None:
    block = BasicBlock(2, 5, 2, project=False)
    x = torch.randn((3, 2, 6, 7), generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(3, 5, 3, 4)
    for row in range(3):
        for column in range(4):
            expected[:, :2, row, column] = x[:, :, 2 * row, 2 * column]
    nn.init.zeros_(block.bn2.weight)  # only the shortcut remains
    assert torch.equal(block(x), F.relu(expected))


def test_fedmr_resnet_starts_as_its_code_does() -> None:
    state = make_model("fedmr_resnet20", CIFAR, 0, {}).state_dict()
    assert torch.equal(state["layer3.1.bn2.weight"], torch.full((64,), 0.5))
    weights = state["layer3.1.conv2.weight"]
    assert weights.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.02)


def test_fedmr_resnet_bottleneck_adds_the_branch_to_the_shortcut() -> None:
    """The bottleneck equals its written definition in training mode, with batch statistics."""
    block = make_model("fedmr_resnet20", CIFAR, 0, {}).get_submodule("layer2.0")
    weights = dict(block.named_parameters())
    x = torch.randn((4, 64, 6, 6), generator=torch.Generator().manual_seed(0))
    y = x
    for i, (stride, padding) in enumerate([(1, 0), (2, 1), (1, 0)], start=1):
        mean, variance = (
            y.mean((0, 2, 3), keepdim=True),
            y.var((0, 2, 3), unbiased=False, keepdim=True),
        )
        y = (y - mean) / (variance + 1e-5).sqrt() * 0.5
        y = F.conv2d(y.clamp(min=0), weights[f"conv{i}.weight"], stride=stride, padding=padding)
    expected = y + F.conv2d(x, weights["downsample.weight"], stride=2)
    torch.testing.assert_close(block(x), expected, rtol=1e-4, atol=1e-4)


def test_padding_counts_in_the_mean_but_is_never_trained() -> None:
    spec = DataSpec((4,), 3, 10)
    module = make_model("fasttext", spec, 0, {"width": 5})
    embedding, hidden = module.get_parameter("embedding.weight"), module.get_submodule("hidden")
    tokens = torch.tensor([[1, 2, 0, 0]])
    logits = module(tokens)
    expected = module.get_submodule("head")(hidden((embedding[1] + embedding[2])[None] / 4))
    torch.testing.assert_close(logits, expected)
    logits.sum().backward()
    assert embedding.grad is not None
    assert not embedding.grad[0].any()
    assert embedding.grad[1].any()
