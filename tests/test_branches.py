"""Sampled branches: drawn from the drafter's own law in one forward, scored on their own prefixes; mixtures; hard anchors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftloop.core.law import Sampling
from draftloop.drafter.draft import ParallelDraft
from draftloop.learn.update import differentiate
from draftloop.objective.honest import expectation
from draftloop.objective.terms import needs_teacher
from draftloop.recipe import BranchPart, StagePart
from draftloop.supervise.anchors import choose
from draftloop.supervise.batch import supervise
from draftloop.supervise.hard import choose_hard
from draftloop.supervise.lesson import FeatureStore
from draftloop.supervise.propose import sampled_blocks
from tests.lessons import DRAFTED, KINDS, World, rolled, world

pytestmark = pytest.mark.specopd


def stage(**cells) -> StagePart:
    return StagePart.model_validate({"name": "s", "steps": 1, **cells})


def scored(part, here: World, lessons, drafter, *, seed=0, visits=None, store=None, together=None):
    return supervise(
        part, lessons, visits or [1] * len(lessons), target=here.target, drafter=drafter, store=store or here.store(),
        seed=seed, need_teacher=needs_teacher(part.objective), together=together,
    )  # fmt: skip


def student(kind):
    drafter = copy.deepcopy(world(kind).drafters["half"])
    drafter.train().requires_grad_(True)
    return drafter.bind(world(kind).target.embed, world(kind).target.readout)


@pytest.mark.parametrize("kind", KINDS)
def test_branches_are_scored_on_their_own_prefix(kind):
    here, drafter = world(kind), student(kind)
    lessons = here.lessons()[:3]
    found = scored(stage(method="specopd", anchors_per_sequence=5), here, lessons, drafter)
    blocks = found.blocks
    assert bool(((blocks.tokens != found.labels) & blocks.valid).any())  # some really leave the trunk
    for i, k in blocks.valid.nonzero().tolist():
        trunk, anchor = lessons[int(blocks.row[i])].trunk, int(blocks.anchor[i])
        ids = torch.tensor([[*trunk.tokens[: anchor + 1], *blocks.tokens[i, :k].tolist()]])
        plain = here.target.model(ids).logits[0, -1]
        ours = here.target.readout.logits(found.teacher[i, k].unsqueeze(0))[0]
        assert (ours - plain).abs().max() < 2e-4 * max(1.0, float(plain.abs().max()))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_from_the_law_that_is_stored_and_trained(temperature):
    here, drafter = world("llama"), student("llama")
    lessons = here.lessons()[:2]
    part = stage(method="specopd", branch={"temperature": temperature, "greedy_share": 0.3}, anchors_per_sequence=6)
    found = scored(part, here, lessons, drafter)
    hidden = found.drafted_rows(drafter)
    assert hidden.requires_grad  # one forward for sampling and loss
    logits = drafter.readout.logits(hidden.detach().flatten(0, 1)).view(*found.blocks.tokens.shape, -1)
    log_q = (logits / temperature).log_softmax(-1).gather(-1, found.blocks.tokens.unsqueeze(-1)).squeeze(-1)
    greedy = (found.blocks.log_q == 0).all(-1)
    assert 0 < int(greedy.sum()) < len(greedy)
    assert torch.equal(found.blocks.tokens[greedy], logits.argmax(-1)[greedy])
    assert torch.allclose(found.blocks.log_q[~greedy], log_q[~greedy], atol=1e-5)


def test_draws_follow_the_law_and_hang_on_their_key_alone():
    here, drafter = world("qwen3"), student("qwen3")
    lesson = here.lessons()[0]
    here.store().fill([lesson])
    anchor = lesson.anchors()[2]
    at = torch.tensor([[anchor]])
    hidden = drafter(lesson.features.unsqueeze(0), at, torch.tensor([[lesson.trunk.tokens[anchor]]]))[0].detach()

    def draw(visit, seed=0):
        return sampled_blocks(
            [lesson], [(0, anchor)], ParallelDraft(hidden), drafter.readout, BranchPart(), eos=(), limit=10**6, seed=seed,
            visits=[visit],
        )[0].tokens[0]  # fmt: skip

    drawn = torch.stack([draw(visit) for visit in range(600)])
    law = drafter.readout.logits(hidden[0]).softmax(-1)
    for k in range(DRAFTED):
        seen = torch.bincount(drawn[:, k], minlength=law.shape[-1]).double() / 600
        assert float((seen - law[k]).abs().sum()) / 2 < 0.2  # total variation; 600 draws
    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(torch.stack([draw(v) for v in range(9)]), torch.stack([draw(v, 1) for v in range(9)]))
    together = scored(stage(method="specopd", anchors_per_sequence=3), here, here.lessons(), drafter).blocks
    alone = scored(stage(method="specopd", anchors_per_sequence=3), here, [here.lessons()[1]], drafter).blocks
    assert torch.equal(together.tokens[together.row == 1], alone.tokens)


def test_a_branch_ends_behind_an_end_of_sequence_and_before_the_limit():
    here, drafter = world("llama"), student("llama")
    lesson = here.lessons()[0]
    here.store().fill([lesson])
    anchors = lesson.anchors()
    token = torch.tensor([[lesson.trunk.tokens[a] for a in anchors]])
    hidden = drafter(lesson.features.unsqueeze(0), torch.tensor([anchors]), token)[0].detach()
    cells = [(0, a) for a in anchors]
    free, _ = sampled_blocks(
        [lesson], cells, ParallelDraft(hidden), drafter.readout, BranchPart(), eos=(), limit=10**6, seed=0, visits=[0]
    )
    end = int(free.tokens[0, 1])
    cut, _ = sampled_blocks(
        [lesson],
        cells,
        ParallelDraft(hidden),
        drafter.readout,
        BranchPart(),
        eos=(end,),
        limit=anchors[-1] + 3,
        seed=0,
        visits=[0],
    )
    assert torch.equal(free.tokens, cut.tokens)
    for i, anchor in enumerate(anchors):
        ended = False
        for k in range(DRAFTED):
            assert bool(cut.valid[i, k]) == (not ended and anchor + k + 1 < anchors[-1] + 3)
            ended |= int(cut.tokens[i, k]) == end
    assert bool(free.valid.all())  # also past the end of the trunk


@pytest.mark.parametrize("kind", KINDS)
def test_kept_trunk_state_gives_the_same_rows(kind):
    here, drafter = world(kind), student(kind)
    part = stage(method="specopd", anchors_per_sequence=4)
    one = scored(part, here, here.lessons(), drafter)
    keep = FeatureStore(here.target, drafter.spec.target_layers, 1e9, keep_state=True)
    two = scored(part, here, here.lessons(), drafter, store=keep)
    valid = one.blocks.valid
    assert torch.equal(one.blocks.tokens, two.blocks.tokens)
    assert (one.teacher - two.teacher)[valid].abs().max() < 1e-4 * float(one.teacher.abs().max())


def test_a_mixture_is_the_weighted_sum_of_its_parts():
    here, drafter = world("llama"), student("llama")
    lessons = here.lessons()[:3]
    cells = {"objective": {"kind": "e2e_tv"}, "anchors_per_sequence": 4}

    def run(proposals):
        part = stage(**cells, proposals=proposals)
        batch = scored(part, here, lessons, drafter)
        learnt = differentiate(part.objective, [batch], drafter, here.target.readout, torch.float32)
        grad = torch.cat([p.grad.flatten() for p in drafter.parameters()])
        drafter.zero_grad()
        return learnt, grad

    (trunk, g), (sampled, h), (both, m) = run("trunk"), run("sampled"), run({"trunk": 1.0, "sampled": 3.0})
    assert both.loss == pytest.approx(0.25 * trunk.loss + 0.75 * sampled.loss, rel=1e-5)
    assert torch.allclose(m, 0.25 * g + 0.75 * h, atol=1e-6)
    assert trunk.loss != pytest.approx(sampled.loss, rel=1e-3)
    assert both.labels == trunk.labels + sampled.labels


def test_the_budget_of_target_tokens_lowers_the_anchors():
    here, drafter = world("llama"), student("llama")
    lessons = here.lessons()[:2]
    tokens = sum(len(lesson.trunk) for lesson in lessons)
    part = stage(method="specopd", anchors_per_sequence=9, branch={"target_tokens": tokens + 2 * 3 * (DRAFTED - 1)})
    assert len(scored(part, here, lessons, drafter).blocks.row) == 6
    part = stage(method="specopd", anchors_per_sequence=9, branch={"target_tokens": 1})
    assert len(scored(part, here, lessons, drafter).blocks.row) == 2  # never none


def test_the_budget_of_target_tokens_is_that_of_all_processes():
    here, drafter = world("llama"), student("llama")
    lessons = here.lessons()[:3]
    tokens = sum(len(lesson.trunk) for lesson in lessons)
    part = stage(method="specopd", anchors_per_sequence=9, branch={"target_tokens": tokens + 3 * 2 * (DRAFTED - 1)})
    alone = scored(part, here, lessons, drafter)
    mine = scored(part, here, lessons[:2], drafter, together=lessons)
    assert len(mine.blocks.row) == 4
    assert torch.equal(mine.anchor, alone.anchor[:2])


def test_sampled_acceptance_agrees_with_the_unbiased_expectation():
    here, drafter = world("llama"), student("llama")
    part = stage(method="specopd", anchors_per_sequence=99)

    def look(spoil):
        total = None
        for visit in range(12):
            batch = scored(part, here, here.lessons(), drafter, visits=[visit] * len(here.lessons()))
            learnt = differentiate(part.objective, [batch], drafter, here.target.readout, torch.float32)
            found = expectation(
                spoil(learnt.overlaps[0]), batch.blocks, temperature=1.0, drawn=Sampling(1.0), coins=batch.coins
            )
            total = found if total is None else total + found
        return total

    honest = look(lambda rows: rows)
    assert abs(honest.agreement()) < 4
    assert not honest.alarm
    assert honest.sampled.count > 500
    wrong = look(lambda rows: rows._replace(alpha=(rows.alpha * 1.5).clamp(max=1)))  # overlaps of another law
    assert wrong.alarm


@pytest.mark.parametrize("greedy_share", [0.0, 0.5])
def test_draft_opd_on_sampled_branches_accepts_by_real_coins(greedy_share):
    """With the law that is stored: a greedy branch was drawn with certainty, so p alone decides."""
    here, drafter = world("qwen3"), student("qwen3")
    branch = {"greedy_share": greedy_share}
    part = stage(proposals="sampled", objective={"kind": "draft_opd"}, branch=branch, anchors_per_sequence=99)
    batch = scored(part, here, here.lessons(), drafter)
    blocks = batch.blocks
    p = here.target.readout.logits(batch.teacher).softmax(-1).gather(-1, blocks.tokens.unsqueeze(-1)).squeeze(-1)
    for i in range(len(blocks.row)):
        alive = True
        for k in range(DRAFTED):
            alive = alive and bool(blocks.valid[i, k])
            alive = alive and float(batch.coins[i, k]) < float(p[i, k] / blocks.log_q[i, k].exp())
            assert bool(blocks.accepted[i, k]) == alive
    assert 0 < int(blocks.accepted.sum()) < int(blocks.valid.sum())


# anchors -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", ["errors", "alpha"])
def test_hard_anchors_are_harder_than_random_ones(policy):
    here, drafter = world("llama"), here_half("llama")
    chances = {"random": [], policy: []}
    for lesson in here.lessons():
        here.store().fill([lesson])
        for visit in range(6):
            hard = choose_hard(policy, lesson, 3, 0, visit, drafter=drafter, target=here.target)
            assert hard == sorted(set(hard))
            assert len(hard) == 3
            assert set(hard) <= set(choose("random", lesson, 12, 0, visit))
            assert hard == choose_hard(policy, lesson, 3, 0, visit, drafter=drafter, target=here.target)
            for name, anchors in ((policy, hard), ("random", choose("random", lesson, 3, 1, visit))):
                at = torch.tensor([anchors])
                token = torch.tensor([[lesson.trunk.tokens[a] for a in anchors]])
                row = drafter(lesson.features.unsqueeze(0), at, token)[0, :, 0]
                own = torch.tensor([lesson.trunk.tokens[a + 1] for a in anchors])
                chances[name] += (drafter.readout.logits(row).argmax(-1) == own).tolist()
    assert sum(chances[policy]) < sum(chances["random"])


def here_half(kind):
    return world(kind).drafters["half"]


# every mix -----------------------------------------------------------------------------------------------------------
mixes = st.sampled_from(
    ["trunk", "sampled", "redraft", "recorded", {"trunk": 1.0, "sampled": 0.5}, {"sampled": 1.0, "redraft": 1.0},
     {"trunk": 0.2, "recorded": 1.0, "sampled": 2.0}]
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    proposals=mixes,
    anchors=st.sampled_from(["random", "errors", "alpha", "all", "rollout"]),
    objective=st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["ce", "forward_kl", "reverse_kl", "tv", "nla", "e2e_tv", "draft_opd"]),
            "estimator": st.sampled_from(["alpha_product", "accept_weighted"]),
            "ce_weight": st.sampled_from([0.0, 0.1]),
            "decay": st.sampled_from([2.0, math.inf]),
            "temperature": st.sampled_from([0.0, 0.6, 1.0]),
        }
    ),
    branch=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.0]),
            "greedy_share": st.sampled_from([0.0, 0.5]),
            "target_tokens": st.sampled_from([None, 40]),
        }
    ),
    count=st.integers(1, 4),
    kind=st.sampled_from(KINDS),
    keep=st.booleans(),
)
def test_any_mix_of_cells_trains_one_step(proposals, anchors, objective, branch, count, kind, keep):
    trunks = "rollout" if anchors == "rollout" else "fixed"
    if "recorded" in proposals and trunks == "fixed":
        anchors, trunks = "rollout", "rollout"
    if proposals == "trunk" and objective["kind"] == "draft_opd":
        objective = {**objective, "kind": "e2e_tv"}
    if objective["kind"] not in ("tv", "e2e_tv"):
        objective = {**objective, "temperature": objective["temperature"] or 1.0}
    part = stage(
        trunks=trunks, anchors=anchors, proposals=proposals, objective=objective, branch=branch,
        anchors_per_sequence=count,
    )  # fmt: skip
    here, drafter = world(kind), student(kind)
    lessons = rolled(kind) if trunks == "rollout" else here.lessons()
    store = FeatureStore(here.target, drafter.spec.target_layers, 1e9, keep_state=keep)
    batches = [scored(part, here, [lesson], drafter, store=store) for lesson in lessons[:2]]
    learnt = differentiate(part.objective, batches, drafter, here.target.readout, torch.float32)
    assert math.isfinite(learnt.loss)
    grads = [p.grad for p in drafter.parameters() if p.grad is not None]
    assert grads
    assert all(bool(g.isfinite().all()) for g in grads)
    assert learnt.labels > 0
