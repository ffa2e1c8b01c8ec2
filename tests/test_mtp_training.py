"""Multi-token prediction: it learns by every objective, what cannot be such a head is refused, its features are kept."""

from __future__ import annotations

import pytest
import torch

from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options
from draftloop.drafter import host
from draftloop.drafter.build import for_decoding
from draftloop.drafter.families import spec_for
from draftloop.recipe import DrafterPart, RolloutPart, StagePart
from draftloop.supervise.lesson import FeatureStore, Lesson
from draftloop.supervise.rollout import roll_out
from tests.lessons import greedy_trunks, prompts, train
from tests.mtp_tiny import mtp_drafter, mtp_target
from tests.stand_ins import requests_of
from tests.tiny import VOCAB

pytestmark = pytest.mark.families
KINDS = ("llama", "qwen3", "phi", "qwen3_5", "deepseek_v3")
DENSE = ("llama", "qwen3_5")
CLOSE = 2e-5  # of the largest entry, in float32


@pytest.fixture(scope="module")
def llama():
    return mtp_target("llama")


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_it_learns_the_targets_answers(kind):
    target = mtp_target(kind)
    trunks = greedy_trunks(target, prompts(3, 6, 4))
    drafter = mtp_drafter(target, block=4, loud=1.0)
    part = StagePart(name="sft", method="sft", anchors="all")
    losses = train(target, drafter, [Lesson(one) for one in trunks], part, 40)
    assert losses[-1] < 0.6 * losses[0]
    made = decode(target, for_decoding(drafter, target), requests_of([3], target.vocab_size), Options(8))
    assert made[0].tokens


CELLS = [
    ("trunk", "ce"), ("trunk", "forward_kl"), ("redraft", "reverse_kl"), ("sampled", "tv"), ("sampled", "nla"),
    ("sampled", "e2e_tv"), ("recorded", "draft_opd"), ("redraft", "draft_opd"), ("recorded", "e2e_tv"),
]  # fmt: skip


@pytest.mark.parametrize(("proposals", "kind"), CELLS, ids=str)
def test_every_objective_reaches_every_weight(llama, proposals, kind):
    drafter = mtp_drafter(llama, block=4, loud=1.0)
    trunks = greedy_trunks(llama, prompts(3, 5))
    recorded = proposals == "recorded"
    lessons = [Lesson(one) for one in trunks]
    if recorded:
        served, how = for_decoding(drafter, llama), RolloutPart(temperature=0.0, rule="match", batch_size=3)
        lessons = list(roll_out(llama, served, trunks, how, max_new_tokens=12, seed=3, visit=0))
    cells = {"trunks": "rollout", "anchors": "rollout"} if recorded else {}
    part = StagePart(name="s", proposals=proposals, objective={"kind": kind}, **cells)
    before = {name: weight.detach().clone() for name, weight in drafter.named_parameters()}
    losses = train(llama, drafter, lessons, part, 2)
    assert all(abs(float(loss)) < 1e4 for loss in losses)
    assert all(not torch.equal(before[name], weight) for name, weight in drafter.named_parameters())


def test_sampling_from_it_and_scoring_it_agree(llama):
    """Redrafted tokens, told again in a packed pass, have the log-probability that they were drawn with."""
    drafter = mtp_drafter(llama, block=4)
    asked = requests_of([4, 6], VOCAB, seed=3)
    options = Options(10, Sampling(1.0), rule="ratio", seed=1, record=True)
    made = decode(llama, for_decoding(drafter, llama), asked, options)
    for one in made:
        text = torch.tensor([[*one.prompt, *one.tokens]])
        for step in one.steps:
            draft = drafter.pack(one.features[None], torch.tensor([[step.anchor]]), text)
            rows = draft.forced(torch.tensor([[step.proposed]]))[0, 0]
            told = drafter.readout.logits(rows).log_softmax(-1)
            scores = told.gather(-1, torch.tensor(step.proposed).unsqueeze(-1)).squeeze(-1)
            assert torch.allclose(scores, torch.tensor(step.log_q), atol=2e-4)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("key", [{"layers": 2}, {"target_layers": [1]}, {"mask_token": 3}, {"heads": 2}], ids=str)
def test_what_means_nothing_for_it_is_refused(key):
    with pytest.raises(ValueError, match="means nothing for family mtp"):
        DrafterPart(family="mtp", **key)


def test_attention_beyond_a_softmax_is_refused_rather_than_left_out(llama):
    from transformers import AttentionInterface

    spec_for(DrafterPart(family="mtp"), llama)
    try:
        AttentionInterface.register(
            host._ATTENTION, lambda *given, **more: host._attention(*given, softcap=30.0, **more)
        )
        with pytest.raises(InputError, match="soft-capped scores"):
            spec_for(DrafterPart(family="mtp"), llama)
    finally:
        AttentionInterface.register(host._ATTENTION, host._attention)


def test_a_class_that_has_no_such_layer_is_refused(llama, monkeypatch):
    told = llama.model.config.to_dict()
    for changes, words in (
        ({"model_type": "no-such"}, "knows no model of type 'no-such'"),
        ({"model_type": "gpt2"}, "gpt2"),
    ):
        monkeypatch.setattr(llama.model.config, "to_dict", lambda changes=changes: {**told, **changes})
        with pytest.raises(InputError, match=words):
            spec_for(DrafterPart(family="mtp"), llama)


def test_features_are_stored_for_it(llama):
    drafter = mtp_drafter(llama)
    store = FeatureStore(llama, drafter.spec.target_layers, 1e9)
    lesson = Lesson(greedy_trunks(llama, prompts(4))[0])
    store.fill([lesson])
    assert lesson.features.shape[-1] == llama.hidden_size
