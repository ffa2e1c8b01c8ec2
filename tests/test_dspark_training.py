"""DSpark under every objective and kind of proposal; its confidence against the formula; a run from recipe to export."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from draftloop.cli import main
from draftloop.core.errors import InputError
from draftloop.drafter.build import for_decoding
from draftloop.evaluate.tau import acceptance
from draftloop.evaluate.walk import walk
from draftloop.formats.load import load_drafter
from draftloop.learn.update import confidence_weight, differentiate
from draftloop.objective.terms import needs_teacher
from draftloop.recipe import DrafterPart, ObjectivePart, Recipe, RolloutPart
from draftloop.supervise.batch import supervise
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.rollout import roll_out
from draftloop.target.load import load_target
from tests.dspark_tiny import HEADS, tiny_dspark
from tests.lessons import greedy_trunks, prompts, stage, train
from tests.tiny import tiny_drafter, tiny_target
from tests.toy_run import toy_recipe

pytestmark = pytest.mark.families


@pytest.fixture(scope="module")
def here():
    target = tiny_target()
    target.eos_ids = ()
    return target, greedy_trunks(target, prompts(3, 7), 16)


def batch_of(here, drafter, part, lessons=None, seed=0):
    target, trunks = here
    lessons = lessons or [Lesson(trunk) for trunk in trunks]
    return supervise(
        part, lessons, [1] * len(lessons), target=target, drafter=drafter,
        store=FeatureStore(target, drafter.spec.target_layers, 1e9), seed=seed,
        need_teacher=needs_teacher(part.objective, confidence_weight(part.objective, drafter)),
    )  # fmt: skip


def parts():
    kinds = ("ce", "forward_kl", "reverse_kl", "tv", "nla", "e2e_tv")
    for proposals in ("trunk", "sampled", "redraft", {"trunk": 0.5, "sampled": 1.0}):
        for kind in kinds:
            yield stage(proposals=proposals, objective={"kind": kind}, anchors_per_sequence=4)
    for proposals in ("sampled", "redraft"):
        yield stage(proposals=proposals, objective={"kind": "draft_opd"}, anchors_per_sequence=4)
    for kind in (*kinds, "draft_opd"):
        yield stage(trunks="rollout", anchors="rollout", proposals="recorded", objective={"kind": kind})


def named(part):
    said = part.proposals if isinstance(part.proposals, str) else "+".join(part.proposals)
    return f"{said}-{part.objective.kind}"


def by_hand(objective, batch, drafter, target) -> tuple[float, float]:
    """The confidence term and DSpark's own TV term (||p - q||_1 / 2), position by position over the whole vocabulary."""
    rows = batch.drafted_rows(drafter)
    q = (drafter.readout.logits(rows) / (objective.temperature or 1)).softmax(-1)
    p = (target.readout.logits(batch.teacher) / (objective.temperature or 1)).softmax(-1)
    blocks = batch.blocks
    first = batch.text[blocks.row, blocks.anchor]
    w, b = drafter.confidence_head.proj.weight[0], drafter.confidence_head.proj.bias[0]
    total = weights = distance = 0.0
    for i in range(len(blocks.tokens)):
        for k in range(blocks.tokens.shape[1]):
            if not blocks.valid[i, k]:
                break
            e = torch.zeros(0)
            if drafter.markov_head is not None:
                e = drafter.markov_head.markov_w1.weight[blocks.tokens[i, k - 1] if k else first[i]]
            c = torch.sigmoid(w @ torch.cat([rows[i, k, :48], e]) + b)
            tv = float((p[i, k] - q[i, k].detach()).abs().sum() / 2)
            weight = math.exp(-k / objective.decay)
            total += weight * -float(((1 - tv) * c.log() + tv * (1 - c).log()).detach())
            distance, weights = distance + weight * tv, weights + weight
    return total / weights, distance / weights


@pytest.mark.parametrize("part", list(parts()), ids=named)
def test_every_objective_on_every_proposal(here, part):
    """It learns, law and confidence; the confidence's term is that of the formula."""
    target, trunks = here
    drafter = tiny_dspark(target, "vanilla")
    lessons = None
    if part.trunks == "rollout":
        rollout = RolloutPart(temperature=1.0, rule="ratio")
        served = for_decoding(drafter, target)
        lessons = roll_out(target, served, trunks, rollout, max_new_tokens=12, seed=3, visit=0)
    batch = batch_of(here, drafter, part, lessons)
    learnt = differentiate(part.objective, [batch], drafter, target.readout, torch.float32)
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert parameter.grad.abs().max() > 0, name
    if len(batch.mixture) == 1 and not (part.objective.kind == "draft_opd" and part.proposals == "sampled"):
        assert learnt.terms["confidence"] == pytest.approx(by_hand(part.objective, batch, drafter, target)[0], rel=1e-4)


@pytest.mark.parametrize("markov", HEADS)
def test_dsparks_own_loss_is_a_recipe(here, markov):
    """0.1 ce + 0.9 ||p - q||_1 + 1.0 BCE with decay 4 = kind tv, whose unit is half of it, all over 1.8."""
    target, _ = here
    drafter = tiny_dspark(target, markov)
    objective = ObjectivePart(kind="tv", ce_weight=0.1 / 1.8, confidence_weight=1 / 1.8, decay=4.0)
    batch = batch_of(here, drafter, stage(objective=objective.model_dump(), anchors="all"))
    learnt = differentiate(objective, [batch], drafter, target.readout, torch.float32)
    bce, tv = by_hand(objective, batch, drafter, target)
    log_q = drafter.readout.logits(batch.drafted_rows(drafter)).log_softmax(-1)
    weight = batch.blocks.valid * torch.exp(-torch.arange(4.0) / 4)
    ce = float((F.nll_loss(log_q.flatten(0, 1), batch.labels.clamp(min=0).flatten(), reduction="none").view_as(weight) * weight).sum() / weight.sum())  # fmt: skip
    assert 1.8 * learnt.loss == pytest.approx(0.1 * ce + 0.9 * 2 * tv + 1.0 * bce, rel=1e-4)


def test_two_uneven_micro_batches_are_one_batch(here):
    target, trunks = here
    drafter = tiny_dspark(target, "gated")
    part = stage(objective={"kind": "e2e_tv"}, anchors="all")
    whole = differentiate(part.objective, [batch_of(here, drafter, part)], drafter, target.readout, torch.float32)
    grads = [p.grad.clone() for p in drafter.parameters()]
    drafter.zero_grad()
    halves = [batch_of((target, [trunk]), drafter, part) for trunk in trunks]
    two = differentiate(part.objective, halves, drafter, target.readout, torch.float32)
    assert two.loss == pytest.approx(whole.loss, rel=1e-5)
    for mine, theirs in zip(drafter.parameters(), grads, strict=True):
        assert (mine.grad - theirs).abs().max() < 1e-4 * theirs.abs().max().clamp(min=1e-6)


def test_the_confidence_moves_no_target_and_alpha_is_not_moved_by_it(here):
    """With the law's share at nearly nothing, what is left pulls on the head and what it reads, never on alpha."""
    target, _ = here
    drafter = tiny_dspark(target)
    objective = ObjectivePart(kind="forward_kl", confidence_weight=1.0)
    batch = batch_of(here, drafter, stage(objective=objective.model_dump()))
    differentiate(objective, [batch], drafter, target.readout, torch.float32)
    both = drafter.markov_head.markov_w2.weight.grad.clone()
    drafter.zero_grad()
    without = objective.model_copy(update={"confidence_weight": 0.0})
    differentiate(without, [batch_of(here, drafter, stage(objective=objective.model_dump()))], drafter, target.readout, torch.float32)  # fmt: skip
    assert torch.allclose(both, drafter.markov_head.markov_w2.weight.grad, atol=1e-7)  # W2 is read by the law alone
    assert drafter.confidence_head.proj.weight.grad is None


def test_training_under_autocast(here):
    target, _ = here
    for markov in ("gated", "rnn"):
        drafter = tiny_dspark(target, markov)
        part = stage(proposals="sampled", objective={"kind": "e2e_tv"})
        target_, trunks = here
        lessons = [Lesson(trunk) for trunk in trunks]
        batch = supervise(
            part, lessons, [0] * 2, target=target_, drafter=drafter, seed=0, need_teacher=True,
            store=FeatureStore(target, drafter.spec.target_layers, 1e9), precision=torch.bfloat16,
        )  # fmt: skip
        learnt = differentiate(part.objective, [batch], drafter, target.readout, torch.bfloat16)
        assert math.isfinite(learnt.loss)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in drafter.parameters())


# what is refused -----------------------------------------------------------------------------------------------------
def test_keys_of_another_family_are_refused():
    for key, value in (("markov", "gated"), ("markov_rank", 8), ("confidence", False)):
        with pytest.raises(ValidationError, match=f"{key} means nothing for family dflash; it is for dspark"):
            DrafterPart(**{key: value})
    with pytest.raises(ValidationError, match="markov_rank means nothing without a Markov head"):
        DrafterPart(family="dspark", markov="none", markov_rank=8)


def test_a_weight_for_a_head_that_is_not_there_is_refused(here):
    stages = [{"name": "s", "steps": 1, "objective": {"kind": "tv", "confidence_weight": 1.0}}]
    for drafter in ({}, {"family": "dspark", "confidence": False}):
        with pytest.raises(ValidationError, match="the drafter has no confidence head"):
            Recipe(drafter=drafter, stages=stages)
    Recipe(drafter={"family": "dspark"}, stages=stages)
    Recipe(drafter={"init": "somewhere"}, stages=stages)  # the folder decides
    objective = ObjectivePart(confidence_weight=1.0)
    with pytest.raises(InputError, match="the drafter has no confidence head"):
        confidence_weight(objective, tiny_drafter(here[0]))
    assert confidence_weight(ObjectivePart(), tiny_drafter(here[0])) == 0
    assert confidence_weight(ObjectivePart(), tiny_dspark(here[0])) == 1


# from recipe to export ------------------------------------------------------------------------------------------------
def test_a_run_from_the_command_line(tmp_path, capsys):
    recipe = toy_recipe(tmp_path)
    recipe["drafter"] |= {"family": "dspark", "block_size": 3, "markov_rank": 8}
    recipe["stages"] = [
        {"name": "sft", "steps": 8, "evaluations": 1, "objective": {"kind": "tv"}, "optimiser": {"lr": 3e-3}},
        {**recipe["stages"][1], "steps": 4, "evaluations": 1},
        {"name": "branches", "method": "specopd", "steps": 2, "evaluations": 1},
    ]
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    run, target = tmp_path / "run", tmp_path / "target"

    def call(*words):
        with pytest.raises(SystemExit) as done:
            main([str(word) for word in words])
        said = capsys.readouterr()
        assert not done.value.code, said.err
        return said.out

    call("train", tmp_path / "recipe.json", "--out", run)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["drafter"]["family"] == "dspark"
    found = json.loads(
        call("evaluate", run, "-t", target, "-p", tmp_path / "test.jsonl", "--confidence", 0.3, "--json", "--cache",
             tmp_path / "cache", "--max-new-tokens", 12, "--dtype", "float32")
    )  # fmt: skip
    assert found["acceptance"]["verified"] < 3
    told = call("evaluate", run, "-t", target, "-p", tmp_path / "test.jsonl", "--confidence", 0.3, "--decode",
                "--max-new-tokens", 12, "--dtype", "float32", "--limit", 2)  # fmt: skip
    assert re.search(r"^tau \d\.\d\d with \d\.\d\d of 3 drafts verified a step", told, re.M), told
    assert "lossless" in call(
        "audit", run, "-t", target, "-p", tmp_path / "test.jsonl", "--confidence", 0.3, "--max-new-tokens", 12
    )
    call("export", run, "-t", target, "--for", "both", "-o", tmp_path / "out")
    loaded = load_target(str(target), dtype="float32", device="cpu")
    a, b = (load_drafter(folder, loaded) for folder in (run / "drafter", tmp_path / "out"))
    assert a.spec.drafted == 3
    served = [tensor.bfloat16() for tensor in a.state_dict().values()]
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(served, b.state_dict().values(), strict=True))


# what confidence brings -----------------------------------------------------------------------------------------------
def test_confidence_keeps_tau_and_saves_verification():
    """After a little training: nearly the same tau for little more than a third of the verified drafts."""
    target = tiny_target()
    target.eos_ids = ()
    lessons = [Lesson(trunk) for trunk in greedy_trunks(target, prompts(3, 9, 5, 4, 7, 6), 24)]
    drafter = tiny_dspark(target, block=6)
    train(target, drafter, lessons, stage(anchors="all", objective={"kind": "tv", "ce_weight": 1.0}), 15)
    served = for_decoding(drafter, target)
    store = FeatureStore(target, served.spec.target_layers, 1e9)

    def tau(confidence):
        return acceptance(walk(served, lessons, store, confidence=confidence), resamples=1)

    whole, short = tau(None), tau(0.05)
    assert whole.verified == 6
    assert short.tau_pooled > 0.95 * whole.tau_pooled
    assert short.verified < 2.5
    assert short.saved(6) > 1.5
