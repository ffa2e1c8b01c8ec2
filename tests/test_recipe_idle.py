"""Cells without effect are named as a run begins, and a budget that cannot be kept; what a loss holds is reckoned."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftloop.recipe import StagePart
from draftloop.recipe_idle import idle_cells
from draftloop.train.plan import loss_rows, over_budget


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"method": "sft", "objective": {"gamma": 0.5}}, ["objective.gamma has no effect on kind ce"]),
        ({"method": "sft", "objective": {"ce_weight": 0.2}}, ["objective.ce_weight has no effect on kind ce"]),
        (
            {"method": "overlap", "rollout": {"refresh_every": 5, "rule": "ratio"}},
            ["rollout.refresh_every, rollout.rule have no effect without trunks: rollout"],
        ),
        ({"method": "draft-opd", "rollout": {"refresh_every": 5}, "objective": {"gamma": 0.5}}, []),
        ({"method": "draft-opd", "objective": {"estimator": "accept_weighted"}}, ["objective.estimator has no effect"]),
        ({"method": "sft", "branch": {"greedy_share": 0.5}}, ["branch.greedy_share has no effect without proposals"]),
        ({"method": "specopd", "branch": {"greedy_share": 0.5, "target_tokens": 9}}, []),
        ({"method": "sft", "branch": {"target_tokens": 9}}, ["without proposals: sampled or redraft"]),
        ({"method": "sft", "optimiser": {"decay_share": 0.5}}, ["decay_share has no effect on schedule cosine"]),
        ({"method": "sft", "optimiser": {"schedule": "wsd", "decay_share": 0.5, "final": 0.1}}, []),
        ({"method": "sft", "optimiser": {"schedule": "constant", "final": 0.1}}, ["final has no effect on schedule"]),
        ({"method": "sft", "stop": {"rise": 0.1}}, ["stop.rise has no effect without patience"]),
        ({"method": "sft", "stop": {"rise": 0.1, "patience": 2}}, []),
        *(({"method": method}, []) for method in ("sft", "overlap", "specopd", "draft-opd", "off-policy-kl", "custom")),
    ],
)
def test_cells_without_effect_are_named(given, said):
    found = idle_cells(StagePart(name="s", steps=1, **given))
    assert len(found) == len(said)
    for line, words in zip(found, said, strict=True):
        assert line.startswith("Stage s: ")
        assert words in line


def test_a_resolved_stage_is_the_same_again():
    """A run's recipe.yaml spells the defaults out; they were not given."""
    stage = StagePart(name="s", method="sft", steps=1)
    assert idle_cells(StagePart(**stage.model_dump())) == []


def test_a_budget_that_one_anchor_exceeds_is_said():
    def part(**cells):
        return StagePart(name="s", steps=1, **{"method": "specopd", "batch_size": 2, **cells})

    lengths = [10, 30, 20]  # the two longest, with two drafts that the trunk does not have each
    assert over_budget(part(branch={"target_tokens": 54}), 3, lengths) == []
    (line,) = over_budget(part(branch={"target_tokens": 53}), 3, lengths)
    assert "may take 54 target tokens, more than branch.target_tokens (53)" in line
    assert over_budget(part(method="sft", branch={"target_tokens": 53}), 3, lengths) == []
    assert over_budget(part(), 3, lengths) == []


@pytest.mark.parametrize(
    ("cells", "device", "rows"),
    [
        ({}, "cuda", 512),
        ({"objective": {"chunk": 100_000}}, "cuda", 12 * 64 * 7),  # no more than there are
        ({"objective": {"chunk": 100_000}}, "cpu", 128),
        ({"batch_size": 1, "anchors_per_sequence": 2}, "cpu", 14),
        ({"batch_size": 1, "anchors_per_sequence": 900, "objective": {"chunk": 100_000}}, "cuda", 91 * 7),
        ({"batch_size": 2, "anchors": "all", "objective": {"chunk": 100_000}}, "cuda", 2 * 91 * 7),
        ({"objective": {"kernel": "triton"}}, "cuda", 0),
    ],
)
def test_a_loss_holds_no_more_rows_than_a_batch_has(cells, device, rows, monkeypatch):
    """Fails if memory is reckoned for a chunk that no batch can fill."""
    monkeypatch.setattr(
        "draftloop.train.plan.eager_reason", lambda stage, *_: None if stage.objective.kernel == "triton" else "so"
    )
    stage = StagePart(name="s", steps=1, **{"batch_size": 12, "anchors_per_sequence": 64, **cells})
    target = SimpleNamespace(device=torch.device(device))
    assert loss_rows(stage, target, SimpleNamespace(spec=SimpleNamespace(drafted=7)), 90.2) == rows
