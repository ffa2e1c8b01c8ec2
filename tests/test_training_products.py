"""Products of training in bfloat16 may round float32 factors; nothing outside of them, and nothing in float32, does."""

from __future__ import annotations

import pytest
import torch

from draftloop.core.products import training_products


@pytest.mark.parametrize(("precision", "within"), [(torch.bfloat16, "high"), (torch.float32, "highest")])
def test_only_within_and_only_in_bfloat16(precision, within):
    assert torch.get_float32_matmul_precision() == "highest"
    seen = []

    @training_products(precision)
    def fails():
        seen.append(torch.get_float32_matmul_precision())
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [within]
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("precision", "within"), [("bfloat16", "high"), ("float32", "highest")])
def test_a_stage_draws_and_learns_in_them_and_is_judged_outside(monkeypatch, tmp_path, precision, within):
    """Fails if only one of drawing and learning is inside, or if validation or the target is: it scores branches here."""
    from draftloop.recipe import Recipe
    from draftloop.target.model import Target
    from draftloop.train import stage
    from draftloop.train.job import train
    from tests.toy_run import toy_recipe

    seen: dict[str, set[str]] = {}

    def watch(name):
        honest = getattr(stage, name)

        def call(*args, **kwargs):
            seen.setdefault(name, set()).add(torch.get_float32_matmul_precision())
            return honest(*args, **kwargs)

        monkeypatch.setattr(stage, name, call)

    for name in ("supervise", "differentiate", "walk"):
        watch(name)
    forward = Target._adds_masks  # is asked within the target's forward

    def reads(self):
        seen.setdefault("target", set()).add(torch.get_float32_matmul_precision())
        return forward(self)

    monkeypatch.setattr(Target, "_adds_masks", reads)
    monkeypatch.chdir(tmp_path)
    given = toy_recipe(tmp_path, precision=precision, evaluate={"decode_prompts": 0, "audit_prompts": 0})
    stages = [{**given["stages"][0], "method": "specopd", "objective": {}}]
    train(Recipe.model_validate({**given, "stages": stages}), out=tmp_path / "run", quiet=True)
    outside = {"target": {"highest"}, "walk": {"highest"}}
    assert seen == {"supervise": {within}, "differentiate": {within}, **outside}
