"""EAGLE-3 in the whole house: decoding, losses, proposals and a run from recipe to export."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import decode
from draftloop.decode.trace import Generation, Options
from draftloop.drafter.build import for_decoding, meet_answers, new_drafter
from draftloop.drafter.eagle3 import default_taps, eagle3_spec, vocabulary
from draftloop.evaluate.offline import offline
from draftloop.evaluate.tau import acceptance
from draftloop.evaluate.walk import responses_of, walk
from draftloop.formats.export import export
from draftloop.formats.load import load_drafter
from draftloop.learn.update import differentiate
from draftloop.objective.terms import needs_teacher
from draftloop.recipe import DrafterPart, ObjectivePart, RolloutPart, StagePart
from draftloop.recipe_file import load_recipe
from draftloop.supervise.batch import supervise
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.rollout import roll_out
from draftloop.train.checkpoint import resolve
from draftloop.train.job import train
from draftloop.train.stage import StageRun
from tests.chains import chain_drafter
from tests.lessons import choose_end, greedy_trunks, prompts
from tests.stand_ins import WAYS
from tests.tiny import tiny_target
from tests.toy_run import toy_recipe

pytestmark = pytest.mark.families


@cache
def world():
    """A target with an end that occurs, its greedy trunks, and a drafter that knows half of them by heart."""
    target = tiny_target("llama")
    asked = prompts(3, 9, 5, 4)
    target.eos_ids = ()
    target.eos_ids = (choose_end([t.tokens[t.first :] for t in greedy_trunks(target, asked)]),)
    trunks = greedy_trunks(target, asked)
    drafter = new_drafter(replace(chain_drafter(target, block=5).spec, draft_vocab=48), target)
    meet_answers(drafter, [trunk.answered for trunk in trunks], target)
    part = StagePart(name="s", method="sft", anchors="all")
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for step in range(30):
        learn(target, drafter, part, [Lesson(t) for t in trunks], step)
        optimiser.step()
        optimiser.zero_grad()
    return target, trunks, drafter


def learn(target, drafter, part, lessons, step=0):
    store = FeatureStore(target, drafter.spec.target_layers, 1e9)
    batch = supervise(
        part, lessons, [step] * len(lessons), target=target, drafter=drafter, store=store, seed=0,
        need_teacher=needs_teacher(part.objective),
    )  # fmt: skip
    return batch, differentiate(part.objective, [batch], drafter, target.readout, torch.float32)


# decoding ---------------------------------------------------------------------------------------------------------------


def requests():
    from draftloop.decode.trace import Request

    return [Request(t.prompt, i) for i, t in enumerate(world()[1])]


def trace(made):
    return made.tokens, [(step.anchor, step.proposed, step.accepted) for step in made.steps]


@pytest.mark.parametrize("way", WAYS)
def test_fixed_shapes_and_compiled_methods_decode_what_the_eager_loop_does(way):
    """Fewer rows than requests, so that rows are refilled; at temperature 0 and under match the target's own text."""
    target, _, drafter = world()
    served = for_decoding(drafter, target)
    options = Options(max_new_tokens=10, seed=9, batch_size=3, **WAYS[way])
    eager = decode(target, served, requests(), options)
    runs = [decode(target, served, requests(), replace(options, engine="graph"))]
    if way == "greedy":  # compiling takes as long as all else
        compiler = partial(torch.compile, dynamic=False, backend="eager")
        engine = GraphEngine(target, served, options, rows=2, longest=30, compiler=compiler)
        runs.append([Generation(request.ids) for request in requests()])
        list(engine.decode(requests(), runs[-1]))
    for made in runs:
        assert list(map(trace, made)) == list(map(trace, eager))
    if options.rule == "match" or options.sampling.greedy:
        plain = decode(target, None, requests(), options)
        assert [g.tokens for g in eager] == [g.tokens for g in plain]
    if options.sampling.greedy:
        assert {s.accepted for g in eager for s in g.steps} - {0}, "something is accepted"


def test_walks_and_offline_tau_are_those_of_real_decoding():
    target, trunks, drafter = world()
    served = for_decoding(drafter, target)
    store = FeatureStore(target, served.spec.target_layers, 1e9)
    walked = walk(served, [Lesson(t) for t in trunks], store)
    made = decode(target, served, requests(), Options(max_new_tokens=22))
    real = responses_of(made, [(f"{t.id}#0", t.set) for t in trunks], served.spec.drafted)
    assert walked == real
    assert acceptance(walked).tau_pooled > 1.2
    drawn = [replace(t, drawn=Sampling()) for t in trunks]
    (tallies,) = offline(target, [served], drawn, Options(max_new_tokens=22))
    assert [t.steps for t in tallies] == [len(r.committed) for r in real]
    assert [t.tau for t in tallies] == pytest.approx([sum(r.committed) / len(r.committed) for r in real])


def test_offline_tau_of_sampled_texts_is_the_mean_of_real_decoding():
    """Under ratio, on average over texts and draws: 4 standard errors."""
    target, trunks, drafter = world()
    served = for_decoding(drafter, target)
    options = Options(max_new_tokens=8, sampling=Sampling(1.0), rule="ratio", batch_size=150, seed=5)
    asked = [replace(requests()[1], sample=i) for i in range(150)]
    made = decode(target, served, asked, options)
    texts = [
        replace(greedy_text(trunks[1], g), drawn=Sampling(1.0), sample=i)
        for i, g in enumerate(made)
        if len(g.tokens) > 1
    ]
    rounds = torch.tensor([float(len(g.steps)) for g in made if len(g.tokens) > 1])
    (tallies,) = offline(target, [served], texts, options)
    expected = torch.tensor([t.steps for t in tallies])
    error = (rounds - expected).std() / len(texts) ** 0.5
    assert abs(float((rounds - expected).mean())) < 4 * float(error)


def greedy_text(trunk, made):
    tokens = (*trunk.prompt, *made.tokens)
    mask = (False,) * len(trunk.prompt) + (True,) * len(made.tokens)
    return replace(trunk, tokens=tokens, mask=mask, finished=made.finished)


# losses -----------------------------------------------------------------------------------------------------------------
KINDS = ("ce", "forward_kl", "reverse_kl", "tv", "nla", "e2e_tv", "draft_opd")
SOURCES = ("trunk", "sampled", "redraft", "recorded")


def part_of(kind: str, source: str) -> StagePart:
    rolled = {"trunks": "rollout", "anchors": "rollout"} if source == "recorded" else {}
    return StagePart(name="s", proposals=source, objective={"kind": kind}, anchors_per_sequence=5, **rolled)


@cache
def rolled_out():
    target, trunks, drafter = world()
    part = RolloutPart(batch_size=3)
    return roll_out(target, for_decoding(drafter, target), trunks, part, max_new_tokens=22, seed=3, visit=0)


def lessons_for(source: str) -> list[Lesson]:
    return [replace(one) for one in rolled_out()] if source == "recorded" else [Lesson(t) for t in world()[1]]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_objective_learns_from_every_source(kind, source):
    if (kind, source) == ("draft_opd", "trunk"):
        pytest.skip("the trunk has no rejected tokens")
    target, _, drafter = world()
    _, learnt = learn(target, drafter, part_of(kind, source), lessons_for(source))
    assert learnt.labels > 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert float(parameter.grad.abs().max()) > 0, name
        parameter.grad = None


@pytest.mark.parametrize(
    ("kind", "source"),
    [("ce", "trunk"), ("forward_kl", "trunk"), ("reverse_kl", "redraft"), ("draft_opd", "recorded"), ("tv", "sampled")],
)
def test_losses_are_those_written_out(kind, source):
    """From full logits over the draft vocabulary, position by position; the readout's own gradient too."""
    target, _, drafter = world()
    part = part_of(kind, source)
    batch, learnt = learn(target, drafter, part, lessons_for(source))
    got = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    for p in drafter.parameters():
        p.grad = None
    support = drafter.support
    anew = replace(batch, draft=None, drawn=())  # the graph of what was drawn is spent
    log_q = (anew.drafted_rows(drafter) @ drafter.lm_head.weight.T).log_softmax(-1)
    log_p = None if batch.teacher is None else target.readout.logits(batch.teacher).log_softmax(-1)

    def value(kind, i, k):
        q = log_q[i, k]
        if kind == "ce":
            return -q[int((support == batch.labels[i, k]).nonzero())]
        inside = log_p[i, k, support]
        if kind == "forward_kl":
            inside = inside.log_softmax(-1)
            return (inside.exp() * (inside - q)).sum()
        if kind == "tv":
            return 1 - torch.minimum(inside.exp(), q.exp()).sum()
        return (q.exp() * (q - inside)).sum()

    sums: dict[str, list] = {}
    blocks, decay = batch.blocks, part.objective.decay
    for i, k in blocks.valid.nonzero().tolist():
        known = int(batch.labels[i, k]) in support.tolist()
        if kind == "draft_opd":
            gone = bool((blocks.valid & ~blocks.accepted)[i, : k + 1].any())
            terms = [("rejected", "reverse_kl", 0.8**k, 0.5)] if gone else [("accepted", "forward_kl", 1.0, 0.5)]
        else:
            terms = [("all", kind, 2.718281828459045 ** (-k / decay), 1.0)] if known or kind != "ce" else []
            if kind == "tv" and known:
                terms += [("ce", "ce", 2.718281828459045 ** (-k / decay), part.objective.ce_weight)]
        for group, what, weight, share in terms:
            total = sums.setdefault(group, [0.0, 0.0, share])
            total[0], total[1] = total[0] + weight * value(what, i, k), total[1] + weight
    want = sum(share * top / bottom for top, bottom, share in sums.values())
    assert learnt.loss == pytest.approx(float(want.detach()), rel=1e-5)
    want.backward()
    for name, p in drafter.named_parameters():
        assert torch.allclose(got[name], p.grad, atol=1e-5 * float(p.grad.abs().max()) + 1e-9), name
        p.grad = None


def test_tokens_outside_the_vocabulary_are_seen_by_the_losses():
    """The trunks hold such tokens: what is tested above is tested on them too."""
    _, trunks, drafter = world()
    tokens = torch.tensor([t for trunk in trunks for t in trunk.answered])
    assert int((~torch.isin(tokens, drafter.support)).sum()) > 0 or drafter.spec.draft_vocab >= len(tokens.unique())


# vocabulary and shape ------------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_the_most_frequent_tokens_and_the_ends():
    counts = torch.tensor([5, 0, 7, 5, 0, 9, 0])
    assert vocabulary(counts, 3, ()).tolist() == [0, 2, 5]
    assert vocabulary(counts, 3, (4,)).tolist() == [2, 4, 5]
    assert vocabulary(counts, 5, ()).tolist() == [0, 1, 2, 3, 5]


def test_the_readout_begins_as_the_targets_own_rows():
    target = tiny_target()
    drafter = chain_drafter(target, vocab=40)
    assert torch.equal(drafter.lm_head.weight, target.readout.weight[drafter.support])
    borrowed = chain_drafter(target, vocab=None)
    assert borrowed.readout is target.readout
    assert not any("lm_head" in name for name, _ in borrowed.named_parameters())


def test_what_a_recipe_means():
    target = tiny_target(layers=12)
    spec = eagle3_spec(DrafterPart(family="eagle3"), target)
    assert (spec.layers, spec.drafted, spec.target_layers, spec.draft_vocab) == (1, 7, (1, 5, 8), target.vocab_size)
    assert not spec.reduced
    assert eagle3_spec(DrafterPart(family="eagle3", draft_vocab=20), target).reduced
    assert eagle3_spec(DrafterPart(family="eagle3", draft_vocab="target"), target).draft_vocab is None
    assert default_taps(30, 3) == (1, 14, 26)
    with pytest.raises(InputError, match="2 layers"):
        eagle3_spec(DrafterPart(family="eagle3", layers=2), target)
    for wrong in ({"mask_token": 3, "family": "eagle3"}, {"draft_vocab": 20}, {"draft_vocab": 0, "family": "eagle3"}):
        with pytest.raises(ValueError, match="means nothing for|no number of tokens"):
            DrafterPart(**wrong)


# a run -----------------------------------------------------------------------------------------------------------------------


def test_a_run_from_recipe_to_export_that_is_killed_on_the_way(tmp_path, monkeypatch):
    """It goes on from its checkpoint with the vocabulary that stands there."""
    recipe = toy_recipe(tmp_path)
    recipe["drafter"] = {"family": "eagle3", "block_size": 4, "target_layers": [0, 1, 2], "draft_vocab": 30}
    opd = recipe["stages"][1] | {"start": "previous", "steps": 4, "rollout": {"refresh_every": 2, "batch_size": 6}}
    specopd = {"name": "specopd", "method": "specopd", "steps": 3, "evaluations": 1}
    recipe["stages"] = [recipe["stages"][0] | {"steps": 6}, opd, specopd]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    go = partial(train, load_recipe(tmp_path / "recipe.yaml"), out=tmp_path / "run", quiet=True, say=lambda text: None)
    update = StageRun._update

    def killed(self, steps):
        if self.part.name == "opd" and self.step == 3:
            raise KeyboardInterrupt
        return update(self, steps)

    with monkeypatch.context() as patch:
        patch.setattr(StageRun, "_update", killed)
        with pytest.raises(KeyboardInterrupt):
            go()
    before = load_file(resolve(tmp_path / "run") / "drafter.safetensors")["support"]
    out = go()
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["lossless"] is True
    assert summary["drafter"]["family"] == "eagle3"
    drafter = load_drafter(out / "drafter")
    kept = load_file(resolve(out) / "drafter.safetensors")
    assert torch.equal(kept["support"], drafter.support), "the vocabulary is part of a checkpoint"
    assert torch.equal(before, drafter.support)
    assert not torch.equal(drafter.support, torch.arange(30)), "and not the one that a drafter is built with"
    made = export(drafter, tmp_path / "out", engine="both", target_name=str(tmp_path / "target"))
    assert made.form == "eagle3"


def test_objectives_of_every_kind_are_tested_here():
    assert set(KINDS) == set(ObjectivePart.model_fields["kind"].annotation.__args__)
