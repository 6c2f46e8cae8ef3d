"""Train on pictures in folders, with one folder per class.

python examples/image_folder.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits

import fedloom as fl


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    with tempfile.TemporaryDirectory() as folder:
        for number, (pixels, label) in enumerate(
            zip(digits.images[:600], digits.target, strict=False)
        ):
            place = Path(folder) / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((pixels * 15).astype("uint8")).save(place / f"{number}.png")
        task = fl.make_task(
            f"images(folder={folder!r}, channels=1)",
            clients=8,
            partition="dirichlet(0.5)",
            model="digits_cnn",
            training=fl.Training(learning_rate=0.1, epochs=2, batch_size=20),
        )
    print(
        f"{len(task.train)} pictures to train on, {len(task.test)} to test on, of "
        f"{task.dataset.classes} classes"
    )
    for method in ("fedavg", "stages(fedavg:10, fedmr)"):
        result = fl.run(method, task, rounds=20, participation=0.5)
        print(f"{method:26} accuracy {100 * result.accuracy:.1f} %")


if __name__ == "__main__":
    main()
