"""Tiny random models that every test room uses."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton, which reads it then

from tests.tiny import tiny_drafter, tiny_model, tiny_target

torch.set_num_threads(1)  # tiny models: on a busy machine a second thread makes a forward ten times slower

KINDS = ["llama", "qwen3", "qwen2", "mistral", "phi"]


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def target(request):
    return tiny_target(request.param)


@pytest.fixture(scope="session")
def drafter(target):
    return tiny_drafter(target)


__all__ = ["tiny_drafter", "tiny_model", "tiny_target"]
