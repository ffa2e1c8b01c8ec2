"""Tiny random models that every test room uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which reads it then

from draftloop.formats.zlab import save_drafter
from tests.checkpoints import loose
from tests.tiny import tiny_drafter, tiny_model, tiny_target

torch.set_num_threads(1)  # tiny models: on a busy machine a second thread makes a forward ten times slower

KINDS = ["llama", "qwen3", "qwen2", "mistral", "phi"]


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def target(request):
    return tiny_target(request.param)


@pytest.fixture(scope="session")
def drafter(target):
    return tiny_drafter(target)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A drafter's folder, in z-lab's form and float32."""
    return save_drafter(loose(), tmp_path / "drafter", dtype=torch.float32)


__all__ = ["tiny_drafter", "tiny_model", "tiny_target"]
