"""Language models of `transformers` that predict the next token at every position, optionally with
adapters of `peft`.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedloom.common.errors import InvalidValue, first_line, import_extra, quoted
from fedloom.common.fields import BelowOne, Count, NonNegativeInt, Positive
from fedloom.data import DataSpec
from fedloom.models import models
from fedloom.models.shapes import vocabulary


@models.register("transformer")
def transformer(
    spec: DataSpec,
    *,
    layers: Count = 2,
    width: Count = 64,
    heads: Count = 4,
    lora: NonNegativeInt = 0,
) -> nn.Module:
    """GPT-2's architecture of any size, with initial weights drawn from the seed.

    It accepts sequences of the data's length. Needs the extra `language`.

    Args:
        layers: Number of blocks.
        width: Width of the embeddings, a multiple of `heads`.
        heads: Number of attention heads in a block.
        lora: Rank of the trained adapters (see `causal_lm`); all other weights are frozen. 0 trains
            the whole model.

    Returns:
        A module from tokens `[b, length]` to a dictionary with `logits [b, length, tokens]`.

    Raises:
        InvalidValue: The data are not tokens, or `heads` does not divide `width`.

    Source: Radford et al. 2019.
    """
    tokens = vocabulary("transformer", spec)
    if width % heads:
        raise InvalidValue(f"transformer: width must be a multiple of heads ({heads}), got {width}")
    with _transformers("transformer") as library:
        settings = library.GPT2Config(
            vocab_size=tokens,
            n_positions=spec.shape[0],
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
        return _adapted(library.GPT2LMHeadModel(settings), lora, None, 0.0, ())


@models.register("causal_lm")
def causal_lm(
    spec: DataSpec,
    *,
    folder: str,
    lora: NonNegativeInt = 8,
    alpha: Positive | None = None,
    dropout: BelowOne = 0.0,
    modules: Sequence[str] = (),
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    attention: Literal["sdpa", "eager"] = "sdpa",
) -> nn.Module:
    """A language model that `save_pretrained` wrote to `folder`, frozen, with trained adapters of
    rank `lora`.

    Each adapted weight W becomes W + (alpha / lora) B A. A is random and B is zero at the start;
    only A and B are trained and travel. Nothing is downloaded, and no code from the folder runs.
    Needs the extra `language`.

    Args:
        folder: The folder of the model. Its vocabulary must contain the tokens of the data.
        lora: Rank of the adapters; 0 trains the whole model.
        alpha: Scale of the adapters; by default 2 lora.
        dropout: Dropout before A, in [0, 1).
        modules: Layers to adapt; by default the choice of peft for this architecture.
        dtype: Type of the frozen weights.
        attention: Implementation of attention; stacked clients need `eager`.

    Returns:
        A module from tokens `[b, length]` to a dictionary with `logits [b, length, tokens]`.

    Raises:
        InvalidValue: The folder has no model, or its model does not fit the data or the options.

    Source: Hu et al. 2022 (LoRA), section 4.1.
    """
    tokens = vocabulary("causal_lm", spec)
    if not (Path(folder) / "config.json").is_file():
        raise InvalidValue(
            f"causal_lm: folder {quoted(folder)} has no config.json. "
            "Give a folder that save_pretrained wrote"
        )
    if lora == 0 and dtype != "float32":
        raise InvalidValue(
            f"causal_lm: dtype={dtype} needs a frozen model with adapters. "
            "Set lora above 0, or dtype=float32"
        )
    with _transformers("causal_lm") as library:
        try:
            base = library.AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                dtype=getattr(torch, dtype),
                use_cache=False,
                attn_implementation=attention,
                trust_remote_code=False,
            )
        except (OSError, ValueError, KeyError) as error:
            raise InvalidValue(
                f"causal_lm: folder {quoted(folder)} cannot be read: {first_line(error)}"
            ) from error
        if base.config.vocab_size < tokens:
            raise InvalidValue(
                f"causal_lm: the model in {quoted(folder)} has {base.config.vocab_size} tokens, "
                f"but the data have {tokens}"
            )
        return _adapted(base, lora, alpha, dropout, modules)


def _adapted(
    base: Any, lora: int, alpha: float | None, dropout: float, modules: Sequence[str]
) -> nn.Module:
    """Return the model with adapters of rank `lora` and all other weights frozen, or unchanged if
    `lora` is 0.
    """
    if lora:
        peft = import_extra("peft", "language", "lora")
        settings = peft.LoraConfig(
            r=lora,
            lora_alpha=alpha or 2 * lora,
            lora_dropout=dropout,
            target_modules=list(modules) or None,
            task_type="CAUSAL_LM",
        )
        try:
            base = peft.get_peft_model(base, settings)
        except ValueError as error:
            raise InvalidValue(f"lora: {first_line(error)}") from error
    model: nn.Module = base.train()
    return model


@contextmanager
def _transformers(model: str) -> Iterator[Any]:
    """Yield the library, with its warnings and progress bars turned off."""
    transformers = import_extra("transformers", "language", f"model {model}")
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield transformers
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
