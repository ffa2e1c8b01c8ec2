"""The decoding loop: its trace against plain forwards, batches against single rows, streaming, bad input."""

from __future__ import annotations

import math

import pytest
import torch

from draftloop.core.draws import Purpose, uniforms
from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.decode.loop import decode, rounds
from draftloop.decode.trace import Generation, Options, Request, Step
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.families import spec_for
from draftloop.recipe import DrafterPart
from draftloop.target.load import load_target
from tests.stand_ins import EOS, WAYS, Scripted, garbled, requests_of, scripts_of, trained_drafter, with_eos
from tests.tiny import tiny_drafter, tiny_model, tiny_target

CLOSE = 1e-5  # of the largest entry


@pytest.fixture(scope="module")
def ending(target):
    return with_eos(target, *EOS)


@pytest.fixture(scope="module")
def requests(target):
    return requests_of([1, 2, 3, 5, 5, 8, 8, 9, 11, 13, 14, 17, 18, 19, 20, 23], target.vocab_size, seed=4)


@pytest.fixture(scope="module")
def half_learned(target, requests):
    """A drafter that is right now and then."""
    return trained_drafter(target, scripts_of(target, requests, Options(max_new_tokens=16))[6:], steps=25)


# the slow way --------------------------------------------------------------------------------------------------------
@torch.no_grad()
def plain_forward(target, ids: list[int], taps=()):
    """Logits [t, V], hidden rows [t, H], tapped features [t, F * H] of one text: one forward, no cache, no padding."""
    out = target.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    features = torch.cat([out.hidden_states[layer + 1][0] for layer in taps], -1) if taps else None
    return out.logits[0], out.hidden_states[-1][0], features


class ByHand:
    """One request decoded by plain forwards of its whole text: no batch, no cache, one token after the other."""

    def __init__(self, target, drafter, request: Request, options: Options) -> None:
        self.target, self.drafter, self.request, self.options = target, drafter, request, options
        self.text, self.steps = list(request.ids), []
        limit = len(request.ids) + options.max_new_tokens
        self._commit([self._draw(self._laws(self.text)[-1], Purpose.TARGET, len(self.text))], limit)
        while not self.ended:
            self._round(limit)

    def _laws(self, text: list[int]) -> torch.Tensor:
        return self.options.sampling.log_probs(plain_forward(self.target, text)[0].double())

    def _uniform(self, purpose: Purpose, position: int, anchor: int = 0) -> float:
        return float(uniforms(self.options.seed, purpose, self.request.key, self.request.sample, anchor, position))

    def _draw(self, log_p: torch.Tensor, purpose: Purpose, position: int, anchor: int = 0) -> int:
        if torch.isfinite(log_p).sum() == 1:
            return int(log_p.argmax())
        shares = (log_p.exp() / log_p.exp().sum()).cumsum(0)
        return int((shares <= self._uniform(purpose, position, anchor)).sum())

    def _commit(self, tokens: list[int], limit: int) -> int:
        before = len(self.text)
        for token in tokens:
            self.text.append(token)
            self.finished = token in self.target.eos_ids
            self.ended = self.finished or len(self.text) == limit
            if self.ended:
                break
        return len(self.text) - before

    @torch.no_grad()
    def _round(self, limit: int) -> None:
        anchor, k = len(self.text) - 1, self.drafter.spec.drafted
        features = plain_forward(self.target, self.text[:-1], self.drafter.spec.target_layers)[2]
        at, last = torch.tensor([[anchor]]), torch.tensor([self.text[-1:]])
        rows = self.drafter(features.unsqueeze(0), at, last)[0, 0]  # the packed path that training uses
        log_q = self.options.drafting.log_probs(self.drafter.readout.logits(rows).double())
        drafts = [self._draw(log_q[i], Purpose.DRAFT, anchor + 1 + i, anchor) for i in range(k)]
        log_p = self._laws(self.text + drafts)[anchor:]
        accepted, token = 0, None
        for i, draft in enumerate(drafts):
            place = anchor + 1 + i
            if self.options.rule == "match" or self.options.sampling.greedy:
                token = self._draw(log_p[i], Purpose.TARGET, place)
                survives = token == draft
            else:
                survives = self._uniform(Purpose.ACCEPT, place, anchor) < math.exp(log_p[i, draft] - log_q[i, draft])
                if not survives:
                    residual = (log_p[i].exp() - log_q[i].exp()).clamp(min=0).log()
                    token = self._draw(residual, Purpose.RESIDUAL, place, anchor)
            if not survives:
                break
            accepted += 1
        else:
            token = self._draw(log_p[k], Purpose.TARGET, anchor + 1 + k)
        scores = tuple(log_q[range(k), drafts].tolist())
        committed = self._commit([*drafts[:accepted], token], limit)
        self.steps.append(Step(anchor, tuple(drafts), scores, accepted, committed))


def gap(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("drafting", ["untrained", "half learned"])
@pytest.mark.parametrize("way", WAYS)
def test_the_batch_decodes_what_one_decodes_by_hand(ending, requests, half_learned, way, drafting):
    """Tokens and the whole trace, of rows that end early and rows that reach the limit."""
    drafter = half_learned if drafting == "half learned" else tiny_drafter(ending, block=3)
    options = Options(max_new_tokens=14, seed=9, batch_size=16, **WAYS[way])
    generations = decode(ending, drafter, requests, options)
    for request, got in list(zip(requests, generations, strict=True))[::3]:
        want = ByHand(ending, drafter, request, options)
        assert [*got.prompt, *got.tokens] == want.text
        assert got.finished == want.finished
        for mine, theirs in zip(got.steps, want.steps, strict=True):
            assert (mine.anchor, mine.proposed, mine.accepted, mine.committed) == (
                theirs.anchor,
                theirs.proposed,
                theirs.accepted,
                theirs.committed,
            )
            assert torch.allclose(torch.tensor(mine.log_q), torch.tensor(theirs.log_q), atol=1e-4)
    assert any(g.finished for g in generations)
    assert not all(g.finished for g in generations)
    if drafting == "half learned":
        assert {0, 1} <= {step.accepted for g in generations for step in g.steps}


# the trace -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_the_trace_tells_the_text(ending, requests, half_learned, way):
    drafted = half_learned.spec.drafted
    for limit in (1, 3, 16):
        options = Options(max_new_tokens=limit, seed=3, batch_size=5, **WAYS[way])
        for g in decode(ending, half_learned, requests, options):
            text = [*g.prompt, *g.tokens]
            assert 1 <= len(g.tokens) <= limit
            assert g.finished == (g.tokens[-1] in EOS)
            assert g.finished or len(g.tokens) == limit
            assert not set(g.tokens[:-1]) & set(EOS)
            place = len(g.prompt)  # the prefill committed the first token
            for step in g.steps:
                assert step.anchor == place
                assert len(step.proposed) == len(step.log_q) == drafted
                assert 1 <= step.committed <= step.accepted + 1 <= drafted + 1
                kept = min(step.accepted, step.committed)
                assert text[place + 1 : place + 1 + kept] == list(step.proposed[:kept])
                if step.committed == step.accepted + 1 <= drafted and options.rule == "match":
                    assert text[place + step.committed] != step.proposed[step.accepted]
                if step.committed <= step.accepted:  # cut by end-of-sequence or length
                    assert step is g.steps[-1]
                place += step.committed
            assert place == len(text) - 1
            if way in ("greedy", "match", "filtered match", "ratio with greedy drafts"):
                assert all(score == 0.0 for step in g.steps for score in step.log_q)


@pytest.mark.parametrize("way", ["greedy", "filtered match", "ratio"])
def test_what_is_recorded_is_what_plain_forwards_give(ending, requests, half_learned, way):
    common = {"seed": 2, "batch_size": 6, "max_new_tokens": 11, **WAYS[way]}
    generations = decode(ending, half_learned, requests, Options(record=True, **common))
    lengths = set()
    for g, bare in zip(generations, decode(ending, half_learned, requests, Options(**common)), strict=True):
        assert (bare.tokens, bare.finished, bare.steps) == (g.tokens, g.finished, g.steps)
        assert bare.features is None
        assert bare.hidden is None
        assert bare.verified is None
        text = [*g.prompt, *g.tokens]
        logits, hidden, features = plain_forward(ending, text[:-1], half_learned.spec.target_layers)
        assert gap(g.features, features) < CLOSE
        assert gap(g.hidden, hidden) < CLOSE
        assert gap(ending.readout.logits(g.hidden), logits) < CLOSE
        if not g.steps:
            assert g.verified is None
            continue
        assert g.verified.shape == (len(g.steps), half_learned.spec.drafted + 1, ending.hidden_size)
        for step, rows in zip(g.steps, g.verified, strict=True):
            branch = [*text[: step.anchor + 1], *step.proposed]
            assert gap(rows, plain_forward(ending, branch)[1][step.anchor :]) < CLOSE
        lengths.add(len(g.tokens))
    assert len(lengths) > 1  # rows that ended early were recorded, too


def test_plain_decoding_records_too(ending, requests):
    options = Options(max_new_tokens=7, record=True, batch_size=3)
    for g in decode(ending, None, requests, options):
        assert [(s.anchor, s.proposed, s.accepted, s.committed) for s in g.steps] == [
            (len(g.prompt) + i, (), 0, 1) for i in range(len(g.tokens) - 1)
        ]
        assert g.features is None
        assert g.verified is None
        assert gap(g.hidden, plain_forward(ending, [*g.prompt, *g.tokens][:-1])[1]) < CLOSE


def test_recorded_rows_are_their_own(target, requests, half_learned):
    """Two generations of one batch share no memory, so that training on one cannot touch another."""
    one, two = decode(target, half_learned, requests[:2], Options(max_new_tokens=6, record=True))
    for name in ("features", "hidden", "verified"):
        before = getattr(two, name).clone()
        getattr(one, name).zero_()
        assert torch.equal(getattr(two, name), before)
        assert not getattr(two, name).requires_grad


# one row, many rows --------------------------------------------------------------------------------------------------
def outcome(g: Generation):
    return g.tokens, g.finished, [(s.anchor, s.proposed, s.accepted, s.committed) for s in g.steps]


@pytest.mark.parametrize("way", WAYS)
def test_a_row_alone_is_a_row_in_a_batch_of_sixteen(ending, requests, half_learned, way):
    options = Options(max_new_tokens=10, seed=5, batch_size=16, **WAYS[way])
    together = decode(ending, half_learned, requests, options)
    for request, g in list(zip(requests, together, strict=True))[::3]:
        assert outcome(decode(ending, half_learned, [request], options)[0]) == outcome(g)


def test_the_order_of_requests_is_that_of_the_results(ending, requests, half_learned):
    options = Options(max_new_tokens=6, sampling=Sampling(1.0), batch_size=4)
    straight = decode(ending, half_learned, requests, options)
    backwards = decode(ending, half_learned, requests[::-1], options)
    assert [outcome(g) for g in straight] == [outcome(g) for g in backwards[::-1]]
    assert [g.prompt for g in backwards] == [r.ids for r in requests[::-1]]


@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_seed_prompt_and_sample_are_what_a_text_depends_on(target, rule):
    drafter = tiny_drafter(target)
    ids = (7, 8, 9)
    texts = {}
    for seed in (0, 1):
        options = Options(max_new_tokens=12, sampling=Sampling(1.0), rule=rule, seed=seed)
        both = [Request(ids, key, sample) for key in (0, 1) for sample in (0, 1)]
        for request, g in zip(both, decode(target, drafter, both, options), strict=True):
            texts[seed, request.key, request.sample] = tuple(g.tokens)
        assert [tuple(g.tokens) for g in decode(target, drafter, both, options)] == list(texts.values())[-4:]
    assert len(set(texts.values())) == 8


def test_half_precision_decodes_under_every_rule():
    target = load_target(tiny_model("llama").bfloat16())
    drafter = for_decoding(tiny_drafter(target), target)
    for way in WAYS.values():
        options = Options(max_new_tokens=9, record=True, **way)
        for g in decode(target, drafter, requests_of([2, 5, 9], target.vocab_size), options):
            assert len(g.tokens) == 9 or g.finished
            assert g.hidden.dtype == torch.bfloat16
            assert all(math.isfinite(score) and score <= 0 for step in g.steps for score in step.log_q)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "phi"])
def test_other_families_decode_what_they_write(kind):
    target = with_eos(tiny_target(kind), *EOS)
    requests = requests_of([1, 4, 4, 9, 12], target.vocab_size, seed=6)
    for sampling in (Sampling(), Sampling(1.0)):
        options = Options(max_new_tokens=12, sampling=sampling, batch_size=4)
        plain = decode(target, None, requests, options)
        script = Scripted(target, garbled(scripts_of(target, requests, options), target.vocab_size), 3)
        for drafter in (tiny_drafter(target), script):
            got = decode(target, drafter, requests, options)
            assert [(g.tokens, g.finished) for g in got] == [(g.tokens, g.finished) for g in plain]


# streaming -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drafting", [True, False])
def test_rounds_stream_what_decode_returns(ending, requests, half_learned, drafting):
    drafter = half_learned if drafting else None
    options = Options(max_new_tokens=9, sampling=Sampling(1.0), rule="ratio", seed=8, batch_size=3)
    results = [Generation(r.ids) for r in requests]
    streamed: list[list[int]] = [[] for _ in requests]
    done: list[int] = []
    for commits in rounds(ending, drafter, requests, options, results):
        assert commits
        assert len({c.index for c in commits}) == len(commits) <= 3
        for commit in commits:
            assert commit.tokens
            assert commit.index not in done
            streamed[commit.index] += commit.tokens
            assert results[commit.index].tokens == streamed[commit.index]
            if commit.done:
                done.append(commit.index)
    assert sorted(done) == list(range(len(requests)))
    wanted = decode(ending, drafter, requests, options)
    assert [g.tokens for g in wanted] == streamed
    assert [outcome(g) for g in results] == [outcome(g) for g in wanted]


# the edges -----------------------------------------------------------------------------------------------------------
def test_nothing_to_decode_is_nothing(target, drafter):
    assert decode(target, drafter, [], Options()) == []


@pytest.mark.parametrize(
    "ids", [(), (1,) * 250, (1, 61), (-1, 2)], ids=["empty", "too long", "beyond the vocabulary", "negative"]
)
@pytest.mark.parametrize("drafting", [True, False])
def test_a_bad_prompt_is_refused_before_anything_is_decoded(target, drafter, ids, drafting):
    results = [Generation((4, 5)), Generation(ids)]
    requests = [Request((4, 5)), Request(ids)]
    with pytest.raises(InputError) as caught:
        next(rounds(target, drafter if drafting else None, requests, Options(max_new_tokens=8, batch_size=1), results))
    assert caught.value.exit_code == 2
    assert not results[0].tokens


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -0.5}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}]
    + [{"temperature": 1.0, "top_p": p} for p in (0.0, 1.5, float("nan"))],
    ids=str,
)
def test_bad_sampling_is_refused(bad):
    with pytest.raises(InputError):
        Sampling(**bad)


@pytest.mark.parametrize("bad", [{"rule": "typical"}, {"rule": ""}, {"max_new_tokens": 0}, {"batch_size": 0}], ids=str)
def test_bad_options_are_refused(bad):
    with pytest.raises(InputError):
        Options(**bad)


def test_a_text_may_fill_the_context_to_the_last_token(target):
    """Blocks reach beyond it near the end."""
    requests = requests_of([target.context_limit - 9, target.context_limit - 12], target.vocab_size)
    for limit in (8, 9):
        options = Options(max_new_tokens=limit)
        plain = decode(with_eos(target), None, requests, options)
        scripts = scripts_of(target, requests, options)
        for drafter in (tiny_drafter(target), Scripted(target, garbled(scripts, target.vocab_size), 5)):
            got = decode(with_eos(target), drafter, requests, options)
            assert [g.tokens for g in got] == [g.tokens for g in plain]


def test_a_text_may_fill_the_context_of_a_model_with_learned_positions():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=61, n_positions=32, n_embd=48, n_layer=4, n_head=4, eos_token_id=3, attn_implementation="sdpa"
    )
    target = load_target(GPT2LMHeadModel(config))
    requests = requests_of([20, 23], 61)
    plain = decode(target, None, requests, Options(max_new_tokens=9))
    got = decode(target, tiny_drafter(target), requests, Options(max_new_tokens=9))
    assert [g.tokens for g in got] == [g.tokens for g in plain]


@pytest.mark.smollm2
def test_smollm2_speculates_what_it_writes():
    target = load_target("smollm2", dtype="float32")
    drafter = new_drafter(spec_for(DrafterPart(layers=2, block_size=8), target), target)
    requests = []
    for chat in ("Name three rivers of Europe.", "What is 17 times 3? Explain briefly."):
        message = [{"role": "user", "content": chat}]
        ids = target.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        requests.append(Request(tuple(ids), key=len(requests)))
    options = Options(max_new_tokens=24)
    plain = decode(target, None, requests, options)
    assert [g.tokens for g in decode(target, drafter, requests, options)] == [g.tokens for g in plain]
    assert all(g.finished or len(g.tokens) == 24 for g in plain)
