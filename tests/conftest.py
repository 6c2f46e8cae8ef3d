"""What holds for every test."""

from __future__ import annotations

import torch

# The models here are so small that threads which wait for each other cost more than the work: on busy cores a hundredfold.
torch.set_num_threads(1)
