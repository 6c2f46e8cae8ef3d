"""Recombine LoRA adapters by FedMR: eight clients adapt a frozen transformer.

Each client has its own modules of Python's library as text.

python examples/lora.py        # needs pip install -e '.[language]'
"""

import importlib.util
import tempfile
from pathlib import Path

import torch
from torch.nn import functional as F

import fedloom as fl
from fedloom.models.build import build_model
from fedloom.objectives.sequence import NextToken

BASE = (
    "argparse",
    "configparser",
    "doctest",
    "inspect",
    "optparse",
    "pdb",
    "pickle",
    "tarfile",
    "typing",
    "zipfile",
)
CLIENTS = (
    "calendar",
    "colorsys",
    "decimal",
    "fractions",
    "heapq",
    "random",
    "statistics",
    "turtle",
)
TOKENS, LENGTH, STEPS, ROUNDS = 128, 64, 500, 20


def characters(*modules: str) -> torch.Tensor:
    """Return pieces `[n, LENGTH + 1]` of the modules' source, with one number per character."""
    text = "".join(
        Path(str(importlib.util.find_spec(name).origin)).read_text("utf-8")[:12_000]
        for name in modules
    )
    codes = torch.tensor([min(ord(letter), TOKENS - 1) for letter in text])
    return codes[: len(codes) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def main() -> None:
    pieces, known = [characters(name) for name in CLIENTS], characters(*BASE)
    test = torch.cat([one[::5] for one in pieces])
    train = torch.cat([one[torch.arange(len(one)) % 5 > 0] for one in pieces])
    owner = torch.cat(
        [torch.full((len(one) - len(one[::5]),), client) for client, one in enumerate(pieces)]
    )
    samples = fl.Samples(train[:, :-1], train[:, 1:], owner), fl.Samples(test[:, :-1], test[:, 1:])
    dataset = fl.Dataset("library", *samples, vocabulary=TOKENS, objective=NextToken())
    base = build_model("transformer(layers=2, width=64, heads=4)", dataset.spec, seed=0)
    optimizer, draw = (
        torch.optim.AdamW(base.parameters(), lr=3e-3),
        torch.Generator().manual_seed(0),
    )
    for batch in known[torch.randint(len(known), (STEPS, 32), generator=draw)]:
        loss = F.cross_entropy(base(batch[:, :-1]).logits.transpose(1, 2), batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = F.cross_entropy(base(test[:, :-1]).logits.transpose(1, 2), test[:, 1:])
    print(f"the base, before the clients train: perplexity {loss.exp():.2f}")
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        adapted = (
            f"causal_lm(folder='{folder}', lora=4, modules=['c_attn', 'c_fc'], attention=eager)"
        )
        training = fl.Training(
            learning_rate=5e-3, optimizer="adam", batch_size=32, schedule="cosine"
        )
        for name, model in (
            ("adapters", adapted),
            ("whole model", adapted.replace("lora=4", "lora=0")),
        ):
            task = fl.make_task(
                dataset, clients=0, partition="natural", model=model, training=training
            )
            for method in ("fedavg", "fedmr"):
                result = fl.run(
                    method, task, rounds=ROUNDS, participation=0.5, evaluate_every=ROUNDS
                )
                sent = result.history[0]["bytes_down"] / len(result.history[0]["clients"]) / 1000
                what = (
                    f"{name}, {method}: {len(task.layout.layers)} layers, {sent:.1f} kB a "
                    "client and round"
                )
                print(
                    f"{what}, perplexity {result.history[-1]['perplexity']:.2f} after {ROUNDS} "
                    "rounds"
                )


if __name__ == "__main__":
    main()
