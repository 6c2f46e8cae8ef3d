"""What holds for every test."""

from __future__ import annotations

import signal

import torch

# The models here are so small that threads which wait for each other cost more than the work: on busy cores a hundredfold.
torch.set_num_threads(1)

# A shell that runs the tests in the background has them, and the programs they start, ignore Ctrl-C; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
