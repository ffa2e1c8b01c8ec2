"""N-gram lookup: what it proposes against a search by hand, its law, its losslessness, its name wherever a folder is."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftloop.cli import main
from draftloop.core.errors import InputError
from draftloop.core.law import Law, Sampling
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import decode
from draftloop.decode.trace import Generation, Options, Request
from draftloop.drafter import ngram
from draftloop.drafter.build import for_decoding
from draftloop.drafter.ngram import NgramSpec, PointMass, look_up, ngram_drafter, ngram_spec
from draftloop.engines.compare import Answer, faults, replay
from draftloop.evaluate.offline import offline
from draftloop.evaluate.tau import acceptance
from draftloop.evaluate.walk import responses_of, walk
from draftloop.formats.load import load_drafter
from draftloop.formats.zlab import save_drafter
from draftloop.supervise.lesson import FeatureStore, Lesson
from tests import test_decode_lossless as lossless
from tests.lessons import greedy_trunks, prompts
from tests.stand_ins import EOS, WAYS, p_value, replies, with_eos
from tests.test_decode_graph import Counting, Watching, agree
from tests.test_serve_engine import engine_python
from tests.tiny import tiny_target

pytestmark = pytest.mark.families
FILLER = 99


def by_hand(text, spec):
    """The longest run first, then the first place where it stands; what follows it, up to the text's end."""
    for n in range(spec.longest, spec.shortest - 1, -1):
        for start in range(len(text) - n):
            if len(text) > n and text[start : start + n] == text[-n:]:
                return text[start + n : start + n + spec.drafted]
    return []


texts = st.lists(st.integers(0, 3), min_size=1, max_size=24)
specs = st.builds(
    lambda k, a, b: NgramSpec(k, min(a, b), max(a, b)), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)
)


@given(lines=st.lists(texts, min_size=1, max_size=4), spec=specs, data=st.data())
@settings(max_examples=150, deadline=None)
def test_it_proposes_what_a_search_by_hand_finds(lines, spec, data):
    width = max(map(len, lines)) + 2
    text = torch.tensor([line + [data.draw(st.integers(0, 3))] * (width - len(line)) for line in lines])
    anchor = torch.tensor([[data.draw(st.integers(0, len(line) - 1)) for _ in range(3)] for line in lines])
    found = look_up(text, anchor, spec, FILLER)
    for row, line in enumerate(lines):
        for column, at in enumerate(anchor[row].tolist()):
            wanted = by_hand(line[: at + 1], spec)
            assert found[row, column].tolist() == wanted + [FILLER] * (spec.drafted - len(wanted))


def test_examples():
    spec = NgramSpec(4, 2, 3)
    say = lambda *text: look_up(torch.tensor([text]), torch.tensor([[len(text) - 1]]), spec, FILLER)[0, 0].tolist()  # noqa: E731
    assert say(1, 2, 3, 4, 2, 3) == [4, 2, 3, FILLER]  # up to the text's end
    assert say(7, 8, 9, 5, 8, 9, 6, 1, 7, 8, 9) == [5, 8, 9, 6]  # the longer run wins, though it stands first
    assert say(8, 9, 5, 5, 8, 9, 6, 6, 8, 9) == [5, 5, 8, 9]  # of two alike the first
    assert say(5, 5, 5, 5, 5) == [5, 5, FILLER, FILLER]  # a place may overlap the end
    assert say(1, 2, 3, 4, 3) == [FILLER] * 4  # one token is too few


def test_its_law_is_a_point_mass_whatever_the_sampling():
    readout = PointMass(torch.empty(11, 0))
    for sampling in (Sampling(), Sampling(1.0), Sampling(0.3, 4, 0.9), Sampling(1.4, top_k=1)):
        law = Law(torch.tensor([[3], [10]]), readout, sampling)
        certain = law.log_probs().exp()
        assert certain.nonzero().tolist() == [[0, 3], [1, 10]]
        assert certain.sum(-1).tolist() == [1, 1]
        tokens, scores = law.draw(torch.tensor([0.01, 0.99], dtype=torch.float64))
        assert (tokens.tolist(), scores.tolist()) == ([3, 10], [0, 0])


# decoding ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def target():
    return with_eos(tiny_target(sharp=9.0), *EOS)


@pytest.fixture(scope="module")
def requests():
    """Prompts that repeat themselves, so that much is found, and some that do not."""
    lines = [[6, 7, 8, 9] * 4, [20, 21] * 5, [30] * 7, [11, 12, 13, 14, 15], [40], [6, 7, 8, 20, 21, 6, 7]]
    return sorted([Request(tuple(line), key=i) for i, line in enumerate(lines)], key=lambda r: len(r.ids))


def lookup(target, name="ngram:4:1:3"):
    return for_decoding(load_drafter(name, target), target)


@pytest.mark.parametrize("way", WAYS)
def test_the_engines_agree_and_where_it_can_be_said_so_does_plain_decoding(target, requests, way):
    options = Options(max_new_tokens=16, seed=3, batch_size=4, record=way in ("greedy", "ratio"), **WAYS[way])
    eager = decode(target, lookup(target), requests, options)
    agree(eager, decode(target, lookup(target), requests, replace(options, engine="graph")))
    steps = [step for made in eager for step in made.steps]
    assert any(step.accepted for step in steps)
    assert all(not any(step.log_q) for step in steps)
    if "ratio" not in way:
        assert replies(eager) == replies(decode(target, None, requests, options))


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 13])
def test_greedy_output_is_that_of_plain_decoding(target, requests, limit):
    for stop in ((), EOS, tuple(range(10, 61, 2))):
        stopping = with_eos(target, *stop)
        options = Options(max_new_tokens=limit, batch_size=3)
        plain = decode(stopping, None, requests, options)
        for name in ("ngram", "ngram:1:1", "ngram:5:1:2"):
            assert replies(decode(stopping, lookup(stopping, name), requests, options)) == replies(plain)


LOOKED_UP: lossless.Axes = [  # as `ONE_DRAFT`, but drafts are not drawn, and a coin must tell quarters
    (4, [(lossless.TARGET, 0, 1)]),
    (4, [(lossless.ACCEPT, 1, 2)]),
    (12, [(lossless.RESIDUAL, 1, 2), (lossless.TARGET, 0, 3)]),
    (4, [(lossless.ACCEPT, 2, 3)]),
    (12, [(lossless.RESIDUAL, 2, 3)]),
]


@pytest.mark.parametrize("eos", [(), (2,)])
@pytest.mark.parametrize("broken", [False, True])
def test_the_loop_under_ratio_is_exactly_lossless(monkeypatch, eos, broken):
    """Every cell of the uniforms, and the law of the text in fractions: with something found and with the filler."""
    toy = lossless.ONE
    drafter = ngram.Ngram(NgramSpec(1, 1, 1), filler=2).bind(None, toy.readout)
    monkeypatch.setattr(lossless, "ToyDrafter", lambda toy: drafter)
    if broken:  # a law that is not the one that it proposes from
        monkeypatch.setattr(PointMass, "logits", lambda self, hidden: torch.zeros(*hidden.shape[:-1], toy.vocab))
    generations = lossless.enumerate_loop(monkeypatch, toy, LOOKED_UP, "ratio", eos=eos)
    proposed = {step.proposed[0] for made in generations for step in made.steps}
    assert {0, 2} <= proposed
    assert (lossless.law_of(generations) == lossless.target_law(toy, eos)) != broken


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.8, top_k=5, top_p=0.9)], ids=str)
@pytest.mark.parametrize("broken", [False, True])
def test_samples_have_the_targets_joint_law(monkeypatch, sampling, broken):
    """With a residual that keeps the drafted token, and so is not (p - q)+, they have not."""
    small = tiny_target(vocab=7, layers=2, sharp=1.5, eos_token_id=None)
    drafter = lookup(small, "ngram:2:1:2")
    if broken:
        monkeypatch.setattr(PointMass, "logits", lambda self, hidden: torch.zeros(*hidden.shape[:-1], 7))
    asked = [Request(lossless.PROMPT, key=5, sample=i) for i in range(4000)]
    made = decode(small, drafter, asked, Options(3, sampling, "ratio", seed=11, batch_size=4000))
    worth = p_value(made, lossless.exact_law(small, sampling))
    assert worth < 1e-8 if broken else worth > 1e-3
    accepted = sum(step.accepted > 0 for one in made for step in one.steps)
    assert accepted > 100 or sampling.top_k


def test_a_round_asks_the_device_for_nothing(target):
    for way in WAYS.values():
        engine = GraphEngine(target, lookup(target), Options(8, record=True, **way), rows=3, longest=40)
        engine.turn()
        engine.rows.at.zero_()
        with Watching() as watching:
            engine.turn()
        assert watching.seen == []


def test_a_compiled_round_speculates_the_same(target, requests):
    options = Options(max_new_tokens=8, sampling=Sampling(1.0), rule="ratio", batch_size=4)
    compiler = partial(torch.compile, dynamic=False, backend=Counting())
    engine = GraphEngine(target, lookup(target), options, rows=4, longest=40, compiler=compiler)
    made = [Generation(request.ids) for request in requests]
    list(engine.decode(requests, made))
    agree(decode(target, lookup(target), requests, options), made)


def test_padding_changes_no_round(target, requests, monkeypatch):
    """Whatever fills a slot that has nothing to propose: with an end-of-sequence, rounds are those of proposing nothing."""
    options = Options(max_new_tokens=16, batch_size=4)
    made = decode(target, lookup(target), requests, options)
    honest = ngram.look_up
    monkeypatch.setattr(
        ngram, "look_up", lambda text, anchor, spec, filler: honest(text, anchor, spec, 5)
    )  # never said
    assert not any(5 in one.tokens for one in made)
    other = decode(target, lookup(target), requests, options)
    assert [[s.committed for s in one.steps] for one in made] == [[s.committed for s in one.steps] for one in other]


# evaluation ----------------------------------------------------------------------------------------------------------
def test_a_walk_takes_the_steps_of_real_decoding_and_needs_no_target(monkeypatch):
    target = with_eos(tiny_target(vocab=11, sharp=2.0), 4)  # so few words that it repeats itself
    asked = prompts(3, 9, 6, 2, 12, vocab=11)
    trunks = greedy_trunks(target, asked)
    drafter = lookup(target)
    made = decode(target, drafter, [Request(ids) for ids in asked], Options(22))
    real = responses_of(made, [(f"{t.id}#{t.sample}", t.set) for t in trunks], 4)
    store = FeatureStore(target, (), 0)
    monkeypatch.setattr(store, "fill", lambda *_: pytest.fail("the text is all that it needs"))
    walked = walk(drafter, [Lesson(trunk) for trunk in trunks], store)
    assert [r.committed for r in walked] == [r.committed for r in real]
    assert acceptance(walked).tau_pooled > 1.1


def test_offline_under_both_rules_is_alike_for_it_never_doubts(target):
    options = Options(16, Sampling(1.0), seed=2, batch_size=8)
    asked = [Request((6, 7, 8, 9) * 3, 1, i) for i in range(12)]
    from draftloop.data.trunk import response_trunk

    made = decode(target, None, asked, options)
    trunks = [
        response_trunk(r.ids, m.tokens, "p", "a", r.sample, m.finished, options.sampling)
        for r, m in zip(asked, made, strict=True)
    ]
    found = {
        rule: offline(target, [lookup(target)], trunks, replace(options, rule=rule))[0] for rule in ("match", "ratio")
    }
    for one, other in zip(found["match"], found["ratio"], strict=True):
        assert one.steps == pytest.approx(other.steps)
    real = decode(target, lookup(target), asked, options)
    assert [tally.steps for tally in found["match"]] == [len(one.steps) for one in real]


# what an engine does -------------------------------------------------------------------------------------------------
def served(text, first, eos, spec, search=by_hand):
    """An engine's account of one greedy answer: it proposes what its own search finds, or nothing."""
    steps, drafts, accepted, at = [1], 0, 0, first
    while at < len(text) - 1:
        proposed = search(text[: at + 1], spec)
        run = 0
        while run < len(proposed) and at + 1 + run < len(text) and proposed[run] == text[at + 1 + run]:
            run += 1
        drafts, accepted = drafts + bool(proposed), accepted + run
        steps.append(min(run + 1, len(text) - 1 - at))
        at += steps[-1]
    return Answer("p", "a", tuple(text[:first]), tuple(text[first:]), tuple(steps), drafts, accepted, text[-1] in eos)


def latest(text, spec):
    """As `by_hand`, but where the run stood last."""
    for n in range(spec.longest, spec.shortest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + spec.drafted]
    return []


def test_an_engine_that_looks_up_alike_agrees_in_every_step_and_another_does_not():
    target = with_eos(tiny_target(vocab=11, sharp=2.0), 4)
    drafter = lookup(target)
    differences = {by_hand: 0, latest: 0}
    idle = ended = 0
    for trunk in greedy_trunks(target, prompts(3, 9, 6, 2, 12, 17, 5, vocab=11)):
        for search in differences:
            answer = served(list(trunk.tokens), trunk.first, target.eos_ids, drafter.spec, search)
            told = {"drafted": 4, "max_new_tokens": 22, "eos": target.eos_ids}
            assert faults(answer, always=False, **told) == []
            idle += bool(faults(answer, **told))  # steps without a draft are a fault of any other drafter
            ended += answer.stopped
            differences[search] += len(replay(target, drafter, answer, temperature=0.0).differences)
    assert differences[by_hand] == 0 < differences[latest]
    assert idle
    assert ended


# its name ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "numbers"),
    [("ngram", (7, 2, 4)), ("ngram:5", (5, 2, 4)), ("ngram:5:3", (5, 3, 3)), ("ngram:8:1:6", (8, 1, 6))],
)
def test_the_name_says_what_is_looked_up(name, numbers):
    spec = ngram_spec(name)
    assert (spec.drafted, spec.shortest, spec.longest) == numbers
    assert ngram_spec(spec.name) == spec


@pytest.mark.parametrize("name", ["ngram:", "ngram:x", "ngram:7:2:4:1"])
def test_a_wrong_name_is_one_sentence(name):
    with pytest.raises(InputError, match="ngram:7:2:4"):
        ngram_spec(name)


@pytest.mark.parametrize(
    ("name", "fault", "fix"),
    [
        ("ngram:0", "ngram:0:2:4 proposes 0 tokens", "with K at least 1, as"),
        ("ngram:7:0:2", "looks for as few as 0 tokens", "with SHORTEST at least 1, as"),
        ("ngram:7:5:2", "looks for at least 5 and at most 2 tokens", "with LONGEST no less than SHORTEST, as"),
    ],
)
def test_of_three_numbers_the_wrong_one_is_named(name, fault, fix):
    with pytest.raises(InputError) as caught:
        ngram_spec(name)
    assert fault in caught.value.what
    assert f"Write ngram:K:SHORTEST:LONGEST {fix} ngram:7:2:4." in caught.value.fix


@pytest.mark.parametrize("name", ["ngram:129", "ngram:1000000:2:4", "ngram:7:1:129", f"ngram:{'9' * 200}"])
def test_more_than_engines_verify_is_refused(name):
    """Unbounded, such a round is as wide as it says, and never ends."""
    with pytest.raises(InputError, match="more than 128 tokens") as caught:
        ngram_spec(name)
    assert len(str(caught.value)) < 250
    assert ngram_spec("ngram:128:2:128").drafted == 128


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch, target):
    from tests.tiny import tiny_drafter

    monkeypatch.chdir(tmp_path)
    assert ngram_spec("ngram") is not None
    save_drafter(tiny_drafter(target), tmp_path / "ngram")
    assert ngram_spec("ngram") is None
    assert load_drafter("ngram", target).spec.family == "dflash"


def test_it_needs_no_target_to_be_named_and_an_end_of_sequence_if_there_is_one(target):
    assert load_drafter("ngram").spec == NgramSpec()
    assert ngram_drafter(NgramSpec(), target).filler == EOS[0]
    assert ngram_drafter(NgramSpec(), with_eos(target)).filler == 0


def run(*arguments):
    with pytest.raises(SystemExit) as done:
        main([*map(str, arguments)])
    return done.value.code


def test_an_engine_is_told_every_length(tmp_path, capsys):
    python = engine_python(tmp_path / "python", device="cuda")
    call = ("serve", "ngram:6:2:3", "--engine-python", python, "-t", "org/model", "--dry-run")
    assert run(*call) == 0
    line = capsys.readouterr().out
    config = json.loads(line[line.index("{") : line.index("}") + 1])
    assert config == {
        "method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 2, "prompt_lookup_max": 3,
    }  # fmt: skip
    assert run(*call, "--engine", "sglang") == 2
    assert "another drafter" in capsys.readouterr().err


def test_what_needs_weights_is_refused(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "r.yaml").write_text(
        f"name: x\ndata: {{train: [{tmp_path / 'a.jsonl'}]}}\nstages: [{{name: s, method: sft, steps: 1}}]\n"
    )
    code = run("train", tmp_path / "r.yaml", "drafter.init=ngram", "--out", tmp_path / "run")
    assert (code, "without weights, so it cannot be trained" in capsys.readouterr().err) == (2, True)
    assert run("export", "ngram") == 2
    assert "it cannot be exported" in capsys.readouterr().err
