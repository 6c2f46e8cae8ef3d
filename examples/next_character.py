"""Learn the next character of texts by five authors; each author is a client.

The texts are in one file, in the format of a play.

python examples/next_character.py
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_linnerud, load_wine

import fedloom as fl

TEXTS = {
    "IRIS": load_iris,
    "WINE": load_wine,
    "CANCER": load_breast_cancer,
    "DIABETES": load_diabetes,
    "GYM": load_linnerud,
}


def play() -> str:
    """Write scikit-learn's descriptions of its data: a name and colon, a speech, an empty line."""
    speeches = {name: " ".join(str(load().DESCR).split())[:5000] for name, load in TEXTS.items()}
    return "\n\n".join(f"{name}:\n{speech}" for name, speech in speeches.items())


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "play.txt").write_text(play())
        task = fl.make_task(
            f"shakespeare(folder='{folder}', length=40)",
            clients=0,  # one client per speaker
            partition="natural",
            model="recurrent(cell=gru, width=32, layers=1)",
            training=fl.Training(optimizer="adam", learning_rate=0.02, epochs=1, batch_size=10),
            metrics=[top_3],
        )
    print(
        f"{task.clients} authors, {task.layout.trainable} weights, {task.dataset.vocabulary} "
        "characters"
    )
    for method in ("fedavg", "fedmr"):
        last = fl.run(method, task, rounds=12, participation=1.0, evaluate_every=12).history[-1]
        among = f"{100 * last['accuracy']:.0f} % guessed, {100 * last['top_3']:.0f} % among three"
        print(f"{method:8} perplexity {last['perplexity']:.1f}; {among}")


def top_3(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the share of characters among the three most likely ones, a custom metric."""
    real = targets >= 0  # the end of a text is padded
    return (outputs.topk(3).indices == targets.unsqueeze(2)).any(2)[real].double().mean()


if __name__ == "__main__":
    main()
