"""Language models: transformers with peft adapters, if installed.

flat/test_frozen.py tests the computation with adapters.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fedloom as fl
from fedloom.common.errors import FedloomError, InvalidValue
from fedloom.data import DataSpec
from fedloom.models.build import build_model
from fedloom.objectives.sequence import NextToken
from fedloom.serving.artifact import save_model
from fedloom.task import Task

TOKENS, WIDTH, RANK = 12, 8, 2
SPEC = DataSpec((6,), TOKENS, TOKENS)

installed = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("peft") is None,
    reason="transformers and peft are not installed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    base = build_model(f"transformer(layers=2, width={WIDTH}, heads=2)", SPEC, 0)
    base.save_pretrained(directory)
    return directory


def task(model: str) -> Task:
    pieces = torch.randint(TOKENS, (40, 7), generator=torch.Generator().manual_seed(1))
    samples = fl.Samples(pieces[:, :-1], pieces[:, 1:])
    dataset = fl.Dataset("pieces", samples, samples[:8], vocabulary=TOKENS, objective=NextToken())
    training = fl.Training(learning_rate=0.5, batch_size=4)
    return fl.make_task(dataset, clients=4, partition="iid", model=model, training=training)


@installed
def test_adapters_alone_are_sent_and_recombined_by_layer(folder: Path, tmp_path: Path) -> None:
    model = f"causal_lm(folder='{folder}', lora={RANK}, modules=['c_attn'], attention=eager)"
    adapted = task(model)
    layout = adapted.layout
    assert layout.size == layout.trainable == 2 * RANK * (WIDTH + 3 * WIDTH)
    assert len(layout.units("layer")) == 2
    assert layout.integers == 0
    directory = tmp_path / "run"
    result = fl.run(
        "fedmr", adapted, rounds=2, participation=1.0, directory=directory, engine="rows"
    )
    assert result.history[0]["bytes_up"] == result.history[0]["bytes_down"] == 4 * 4 * layout.size
    pool, uploads = result.federation.algorithm.state["pool"], result.federation.model()
    assert pool.shape == (4, layout.size)
    assert not torch.equal(uploads, adapted.initial)
    file, probe = tmp_path / "model.safetensors", torch.randint(TOKENS, (3, 6))
    save_model(file, result.model, model, SPEC, {})
    # both load as complete models
    for saved in (fl.load_model(directory, build_model(model, SPEC, 7)), fl.load_model(file)):
        assert torch.equal(saved(probe).logits, result.model(probe).logits)
    frozen, base = layout.frozen_tensors(result.model), layout.frozen_tensors(adapted.model)
    assert all(torch.equal(frozen[name], base[name]) for name in base)
    stacked = fl.run("fedmr", adapted, rounds=2, participation=1.0, engine="stacked")
    assert stacked.federation.notices == []
    torch.testing.assert_close(stacked.federation.model(), uploads, rtol=0, atol=1e-5)


@installed
def test_the_base_may_be_in_half_precision_and_the_whole_model_may_train(folder: Path) -> None:
    half = task(f"causal_lm(folder='{folder}', lora={RANK}, dtype=bfloat16)")
    assert (half.layout.dtype, half.model.get_input_embeddings().weight.dtype) == (
        torch.float32,
        torch.bfloat16,
    )
    result = fl.run("fedavg", half, rounds=1, participation=0.25, engine="rows")
    assert not torch.equal(result.federation.model(), half.initial)
    full_model = build_model(f"causal_lm(folder='{folder}', lora=0)", SPEC, 0)
    assert all(parameter.requires_grad for parameter in full_model.parameters())


@installed
def test_adapters_cost_a_small_part_of_the_whole_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With adapters, the shortened script from examples/ sends 18.4 kB instead of 449.5 kB.

    It runs in this process, because importing transformers takes seconds.
    """
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
    lora = importlib.import_module("lora")
    for name, value in (
        ("STEPS", 2),
        ("ROUNDS", 1),
        ("BASE", ("heapq",)),
        ("CLIENTS", ("colorsys", "this")),
    ):
        monkeypatch.setattr(lora, name, value)
    lora.main()
    text = capsys.readouterr().out
    sent = {
        name: float(size)
        for name, size in re.findall(r"^([a-z ]+), fedmr: .* ([\d.]+) kB", text, re.M)
    }
    assert sent == {"adapters": 18.4, "whole model": 449.5}


@installed
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "causal_lm(folder='nowhere')",
            "causal_lm: folder 'nowhere' has no config.json",
        ),
        (
            "causal_lm(folder='{folder}', lora=0, dtype=bfloat16)",
            "dtype=bfloat16 needs a frozen model with adapters",
        ),
        ("causal_lm(folder='{folder}', modules=['c_atn'])", "lora: Target modules"),
        ("causal_lm", "causal_lm needs folder"),
        (
            "transformer(width=10, heads=4)",
            "width must be a multiple of heads (4), got 10",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_in_one_line(
    model: str, message: str, folder: Path
) -> None:
    with pytest.raises(FedloomError) as error:
        build_model(model.format(folder=folder), SPEC, 0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@installed
def test_a_vocabulary_that_the_model_does_not_know_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidValue, match="has 12 tokens, but the data have 13"):
        build_model(f"causal_lm(folder='{folder}')", DataSpec((6,), 13, 13), 0)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        FedloomError,
        match=r"model transformer needs 'transformers': pip install -e '.\[language\]'",
    ):
        build_model("transformer", SPEC, 0)
    with pytest.raises(FedloomError, match="transformer needs tokens"):
        build_model("transformer", DataSpec((1, 8, 8), 10), 0)


@installed
def test_a_folder_that_needs_its_own_code_is_refused_without_a_question(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "own")
    config = json.loads((tmp_path / "own/config.json").read_text())
    config |= {
        "model_type": "of_its_own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (tmp_path / "own/config.json").write_text(json.dumps(config))
    (tmp_path / "own/own.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(InvalidValue, match="cannot be read"):
        build_model(f"causal_lm(folder='{tmp_path / 'own'}')", SPEC, 0)
