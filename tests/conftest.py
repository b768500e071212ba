"""One thread, fixed seeds, no network. Torch is imported by the tests that need it, not here."""

import os
import sys

# libgomp spins while it waits: beside any other busy process a tiny model takes a hundred times longer
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["GOMP_SPINCOUNT"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import random

import pytest


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers for every test, whatever ran before it."""
    random.seed(0)
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(0)
