"""The offline evaluation: against the enumerated verifier, against real decoding, and broken on purpose."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draftloop
from draftloop.cli import main
from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.data.trunk import Trunk, response_trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.spec import spec_for
from draftloop.evaluate import offline as room
from draftloop.evaluate.offline import offline
from draftloop.evaluate.tau import Response, acceptance, paired
from draftloop.evaluate.walk import responses_of, walk
from draftloop.recipe import DrafterPart
from tests.lessons import BLOCK, DRAFTED, KINDS, LENGTH, Patchy, prompts, world
from tests.stand_ins import ToyDrafter, ToyTarget
from tests.tiny import tiny_drafter, tiny_target
from tests.toy import MATCH, RATIO, Toy, play
from tests.toy_run import toy_checkpoint, toy_prompts

pytestmark = pytest.mark.specopd


# the enumerated verifier -----------------------------------------------------------------------------------------------
class Packed(ToyDrafter):
    """The toy's drafter on a text that stands already, as training and walks call one."""

    def __init__(self, toy):
        super().__init__(toy)
        self.spec = SimpleNamespace(target_layers=(0,), drafted=toy.drafted, block_size=toy.drafted + 1)

    def __call__(self, features, anchor, tokens):
        node = self.toy.child(features[0, anchor[0] - 1, 0], tokens)
        if not self.toy.own_prefix:
            return self.toy.q_logits[node]
        rows = []
        for at in anchor[0].tolist():  # on the text's own prefix, where it goes on
            below = [*features[0, at:, 0].tolist()]
            node, line = int(self.toy.child(features[0, at - 1, 0], tokens[0, at - int(anchor[0, 0])])), []
            for k in range(self.spec.drafted):
                node = below[k] if k < len(below) else node
                line.append(self.toy.q_logits[min(node, self.toy.nodes - 1), 0])
            rows.append(torch.stack(line))
        return torch.stack(rows).unsqueeze(0)


class Scored(ToyTarget):
    version, hidden_size = 0, 1


def path(toy, node):
    """The texts on the way to a node, the empty one first."""
    out = [node]
    while out[0]:
        out.insert(0, (out[0] - 1) // toy.vocab)
    return out


def enumerated(toy, method, length, eos, start=0):
    """{text: (its probability, [expected steps, expected tokens / steps, survivors, refusals] given it)}, exactly."""
    total = toy.level(start)
    running = {(start, (), ()): Fraction(1)}
    over = defaultdict(list)
    while running:
        after = defaultdict(Fraction)
        for (at, committed, accepted), share in running.items():
            for (end, survived), mass in play(toy, method, at).items():
                line = path(toy, end)[toy.level(at) + 1 :]
                said = [(node - 1) % toy.vocab for node in line]
                stop = min(len(line), length + total - toy.level(at))
                stop = next((i + 1 for i, token in enumerate(said[:stop]) if token in eos), stop)
                node, ended = line[stop - 1], said[stop - 1] in eos or toy.level(line[stop - 1]) == length + total
                key = (node, (*committed, stop), (*accepted, min(survived, stop)))
                if ended:
                    over[node].append((share * mass, Response("x", "s", key[1], key[2], toy.drafted)))
                else:
                    after[key] += share * mass
        running = after
    out = {}
    for node, ways in over.items():
        mass = sum(share for share, _ in ways)
        each = [(share / mass, way.tally) for share, way in ways]
        mean = [
            sum(w * Fraction(t.steps) for w, t in each),
            sum(w * Fraction(t.tokens) / Fraction(t.steps) for w, t in each),
        ]
        for name in ("survivors", "refusals"):
            mean += [sum(w * Fraction(getattr(t, name)[k]) for w, t in each) for k in range(toy.drafted)]
        out[node] = (mass, [float(x) for x in mean])
    return out


def chain_of(toy, rule, node, start=0):
    """[n, K] acceptance probabilities of a text, from the toy's fractions."""
    line = path(toy, node)
    line = line[toy.level(start) :]
    n = len(line) - 1
    log_p, log_q = torch.zeros(n, toy.drafted), torch.full((n, toy.drafted), float("-inf"))
    for a in range(n):
        for k in range(min(toy.drafted, n - a)):
            token = (line[a + k + 1] - 1) % toy.vocab
            p, q = toy.p_law(line[a + k])[token], toy.q_law(line[a], line[a + k], k)
            if rule == "match":
                q = [Fraction(v == max(range(toy.vocab), key=lambda u: (q[u], -u))) for v in range(toy.vocab)]
            log_p[a, k], log_q[a, k] = math.log(p), math.log(q[token]) if q[token] else float("-inf")
    return room.survival(log_p.double(), log_q.double()).numpy()


def numbers(tally):
    return [tally.steps, tally.tau, *tally.survivors, *tally.refusals]


def toy_of(seed, own_prefix, drafted=2, **changes):
    weights = {"p_weights": [(1, 3), (2, 2)], "q_weights": [(1, 1), (1, 3), (0, 4)]}
    return Toy(vocab=2, drafted=drafted, own_prefix=own_prefix, seed=seed, **{**weights, **changes})


def exact(toy, method, eos, length=3):
    """Whether the chain says of every text what the enumerated verifier does, and the texts have the target's law."""
    found = enumerated(toy, method, length, eos)
    assert sum(mass for mass, _ in found.values()) == 1
    for node, (mass, wanted) in found.items():
        line, law = path(toy, node), Fraction(1)
        for above, below in pairwise(line):
            law *= toy.p_law(above)[(below - 1) % toy.vocab]
        assert mass == law
        tally = room.tally_chain("x", "s", chain_of(toy, method.rule, node))
        assert tally.tokens == toy.level(node)
        if not np.allclose(numbers(tally), wanted, rtol=0, atol=1e-6):
            return False
    return True


@pytest.mark.parametrize("method", [MATCH, RATIO], ids=["match", "ratio"])
@pytest.mark.parametrize("own_prefix", [False, True], ids=["parallel", "own-prefix"])
@pytest.mark.parametrize("eos", [(), (1,)], ids=["no-end", "end"])
@pytest.mark.parametrize(("drafted", "seed"), [(1, 0), (2, 1), (2, 2)])
def test_given_any_text_it_is_the_verifier_s_own_law(method, own_prefix, eos, drafted, seed):
    assert exact(toy_of(seed, own_prefix, drafted), method, eos)


@pytest.mark.parametrize("method", [MATCH, RATIO], ids=["match", "ratio"])
def test_filters_count(method):
    changes = {"p_weights": [(1, 3, 4)], "q_weights": [(1, 1, 2), (2, 1, 1)], "sampling": Sampling(1.0, top_k=2)}
    toy = Toy(vocab=3, drafted=2, seed=4, **changes)
    assert exact(toy, method, (2,), length=2)


def law_cut(keep, left):
    """The last token of the text never comes as a draft."""
    law = GAINS(keep, left)
    return law if len(law) < left else GAINS(np.where(np.arange(len(keep)) == left - 2, 0.0, keep), left)


GAINS, SURVIVAL = room.gains, room.survival
BROKEN = {
    "p and q swapped": ("survival", lambda log_p, log_q: SURVIVAL(log_q, log_p)),
    "no minimum": ("survival", lambda log_p, log_q: (log_q - log_p).exp().clamp(max=1.5)),
    "acceptance of the draft, not of the text": ("survival", lambda log_p, log_q: (log_p + 0 * log_q).exp()),
    "a correction token too few": ("gains", lambda keep, left: GAINS(np.append(keep[:-1], 0.0), left)),
    "one off at the end": ("gains", lambda keep, left: law_cut(keep, left)),
    "the text seems longer": ("gains", lambda keep, left: GAINS(keep, left + 1)[:left]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_chain_is_found(name, monkeypatch):
    part, wrong = BROKEN[name]
    monkeypatch.setattr(room, part, wrong)
    assert not all(exact(toy_of(seed, False), RATIO, ()) for seed in (1, 2, 3))


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("own_prefix", [False, True], ids=["parallel", "own-prefix"])
def test_from_laws_to_tallies(rule, own_prefix):
    """The whole path, hidden rows to tallies, on every text of a toy; the first token is the prefill's."""
    toy = toy_of(5, own_prefix)
    target, drafter = Scored(toy), Packed(toy)
    for first in toy.text_law(1):
        for node, (_, wanted) in enumerated(toy, MATCH if rule == "match" else RATIO, 2, (), first).items():
            said = [(at - 1) % toy.vocab for at in path(toy, node)[1:]]
            trunk = response_trunk([0], said, "x", "s", 0, False, Sampling(1.0))
            options = Options(3, Sampling(1.0), rule)
            ((tally,),) = offline(target, [drafter], [trunk], options)
            assert numbers(tally) == pytest.approx(wanted, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_chain_is_the_mean_of_its_walks(data):
    """Brute force over every way through a text, for any acceptance probabilities."""
    n, drafted = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    share = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
    keep = np.array(data.draw(st.lists(st.lists(share, min_size=drafted, max_size=drafted), min_size=n, max_size=n)))
    ways = [((), (), 1.0)]
    over = []
    while ways:
        committed, accepted, mass = ways.pop()
        at = sum(committed)
        if at == n:
            over.append((mass, Response("x", "s", committed, accepted, drafted).tally))
            continue
        for run in range(drafted + 1):
            odds = mass * keep[at, :run].prod() * (1.0 if run == drafted else 1 - keep[at, run])
            gain = min(run + 1, n - at)
            if odds:
                ways.append(((*committed, gain), (*accepted, min(run, gain)), odds))
    wanted = sum(mass * np.array(numbers(tally)) for mass, tally in over)
    assert np.allclose(numbers(room.tally_chain("x", "s", keep)), wanted, rtol=0, atol=1e-12)


# real decoding ---------------------------------------------------------------------------------------------------------
@cache
def flat(kind):
    """A target whose laws are so flat that an untrained drafter often agrees, two such drafters, prompts."""
    target = tiny_target(kind, sharp=0.6)
    target.eos_ids = (11, 12)
    drafters = [for_decoding(tiny_drafter(target, seed, block=BLOCK), target) for seed in (0, 1)]
    return SimpleNamespace(target=target, drafters=drafters, prompts=prompts(3, 9, 5))


def drawn(here, options, drafter=None, samples=1):
    """Requests, what decoding makes of them, and the texts as trunks."""
    asked = [Request(ids, 40 + i, s) for i, ids in enumerate(here.prompts) for s in range(samples)]
    made = decode(here.target, drafter, asked, options)
    trunks = [
        response_trunk(r.ids, m.tokens, f"p{r.key}", "ab"[r.key % 2], r.sample, m.finished, options.sampling)
        for r, m in zip(asked, made, strict=True)
    ]
    assert {trunk.finished for trunk in trunks} == {True, False}
    return made, trunks


def counted(made, trunks):
    return [r.tally for r in responses_of(made, [(f"{t.id}#{t.sample}", t.set) for t in trunks], DRAFTED)]


@pytest.mark.parametrize("rule", ["match", "ratio"])
@pytest.mark.parametrize("name", ["half", "patchy"])
def test_at_temperature_0_it_is_the_walk(name, rule):
    here = world("llama")
    trunks = [replace(trunk, drawn=Sampling()) for trunk in here.trunks]
    (tallies,) = offline(here.target, [here.drafters[name]], trunks, Options(LENGTH, rule=rule), slots=9)
    walked = walk(here.drafters[name], here.lessons(), here.store())
    assert tallies == [response.tally for response in walked]
    assert acceptance(tallies) == acceptance(walked)


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0), Sampling(1.3, 30, 0.9)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_by_match_it_is_decoding_s_own_steps(kind, sampling):
    """Draws of the target are keyed by position alone, so decoding writes the very texts that plain decoding wrote."""
    here = flat(kind)
    options = Options(LENGTH, sampling, "match", seed=3, batch_size=64)
    _, trunks = drawn(here, options, samples=8)
    found = offline(here.target, here.drafters, trunks, options, slots=150)
    for drafter, tallies in zip(here.drafters, found, strict=True):
        made, again = drawn(here, options, drafter, samples=8)
        assert again == trunks
        assert tallies == counted(made, trunks)


def surprise(real, told):
    """By how many standard errors the sums of real decoding lie off: steps, survivors and refusals by position."""
    off = np.array([np.subtract(numbers(r), numbers(t)) for r, t in zip(real, told, strict=True)])
    return np.abs(off.sum(0)) / np.sqrt((off**2).sum(0) + 1e-12)


WRONG = {
    "p and q swapped": ("survival", lambda log_p, log_q: SURVIVAL(log_q, log_p)),
    "one off at the end": ("gains", lambda keep, left: law_cut(keep, left)),
}


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0), Sampling(1.0, 30, 0.9)], ids=str)
def test_by_ratio_it_is_what_real_steps_are_on_average(sampling, monkeypatch):
    """On the texts that this very decoding wrote: what is left of the noise is the drafts' and the coins'."""
    here = flat("llama")
    options = Options(LENGTH, sampling, "ratio", seed=8, batch_size=256)
    made, trunks = drawn(here, options, here.drafters[0], samples=60)
    real = counted(made, trunks)
    (told,) = offline(here.target, here.drafters[:1], trunks, options)
    assert surprise(real, told).max() < 3.5
    for part, wrong in WRONG.values():
        with monkeypatch.context() as patch:
            patch.setattr(room, part, wrong)
            (otherwise,) = offline(here.target, here.drafters[:1], trunks, options)
        assert surprise(real, otherwise).max() > 3.5  # the same bar, from the other side


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0)], ids=str)
@pytest.mark.parametrize("rule", ["match", "ratio"])
def test_other_texts_tell_the_same_within_their_interval(rule, sampling):
    here = flat("qwen3")
    options = Options(LENGTH, sampling, rule, seed=5, batch_size=64)
    _, trunks = drawn(here, options, samples=15)
    (told,) = offline(here.target, here.drafters[:1], trunks, options)
    real = acceptance(counted(*drawn(here, replace(options, seed=6), here.drafters[0], samples=15)))
    found = acceptance(told)
    assert abs(real.tau_pooled - found.tau_pooled) < sum((b - a) / 2 for a, b in (real.interval, found.interval))
    assert abs(real.tau_mean - found.tau_mean) < sum((b - a) / 2 for a, b in (real.interval_mean, found.interval_mean))
    if rule == "ratio":
        assert np.diff(found.interval) < np.diff(real.interval)  # drafts and coins are averaged over


def test_two_drafters_are_paired():
    here = flat("llama")
    options = Options(LENGTH, Sampling(1.0), "ratio", batch_size=64)
    _, trunks = drawn(here, options, samples=10)
    told = []
    drafters = [here.drafters[0], Halved(here.drafters[0]), here.drafters[0]]
    found = offline(here.target, drafters, trunks, options, advance=lambda *at: told.append(at))
    assert told[-1] == (len(trunks), len(trunks))
    assert found[2] == found[0]
    gain = paired(found[1], found[0])
    assert gain.difference == acceptance(found[0]).tau_pooled - acceptance(found[1]).tau_pooled
    apart = [acceptance(part).interval for part in found[:2]]
    assert gain.difference_interval[0] > 0
    assert np.diff(gain.difference_interval) < np.diff(apart).max()
    for one, tallies in zip(drafters, found, strict=True):
        assert offline(here.target, [one], trunks, options, slots=40)[0] == [
            replace(
                t,
                **{
                    n: pytest.approx(getattr(t, n), rel=1e-4, abs=1e-6)
                    for n in ("steps", "tau", "survivors", "refusals")
                },
            )
            for t in tallies
        ]


class Halved(Patchy):
    """The same drafter with its first slot spoilt, where acceptance is decided."""

    def _spoil(self, hidden, anchor):
        return torch.cat([-hidden[..., :1, :], hidden[..., 1:, :]], -2)


# what is refused -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (None, "not written down"),
        (Sampling(0.7), r"drawn at temperature 0.7 .* not at temperature 1 "),
        (Sampling(1.0, top_k=5), "top_k 5"),
        (Sampling(1.0, top_p=0.9), "top_p 0.9"),
        (Sampling(), "drawn at temperature 0 "),
    ],
)
def test_texts_drawn_otherwise_are_refused(how, says):
    here = flat("llama")
    trunks = [response_trunk([7, 8], [9, 10, 13], "p0", "s", 0, False, how)]
    for rule in ("match", "ratio"):
        with pytest.raises(InputError, match=says) as caught:
            offline(here.target, [here.drafters[0]], trunks, Options(LENGTH, Sampling(1.0), rule))
        assert caught.value.where == "p0"
        assert "anew" in caught.value.fix or "temperature" in caught.value.fix


def test_texts_that_the_target_never_writes_are_refused():
    here, sampling = flat("llama"), Sampling(1.0, top_k=3)
    trunks = [response_trunk([7, 8], range(13, 33), "p0", "s", 0, False, sampling)]
    with pytest.raises(InputError, match="probability 0"):
        offline(here.target, [here.drafters[0]], trunks, Options(LENGTH, sampling, "ratio"))


def test_several_responses_are_refused_and_one_token_is_no_step():
    here, sampling = flat("llama"), Sampling(1.0)
    talk = Trunk("talk", "s", 0, (7, 8, 9, 10, 11, 12), (False, True, True, False, True, True), True, sampling)
    with pytest.raises(InputError, match="several responses"):
        offline(here.target, [here.drafters[0]], [talk], Options(LENGTH, sampling))
    short = response_trunk([7, 8], [9], "short", "s", 0, False, sampling)
    for rule in ("match", "ratio"):
        ((tally,),) = offline(here.target, [here.drafters[0]], [short], Options(LENGTH, sampling, rule))
        assert (tally.tokens, tally.steps, sum(tally.survivors)) == (0, 0.0, 0.0)
    with pytest.raises(InputError, match="verify step"):
        acceptance([tally])


def test_how_a_response_was_drawn_is_kept():
    trunk = response_trunk([7, 8], [9], "a", "s", 0, False, Sampling(0.7, 5, 0.9))
    assert Trunk.from_json(trunk.to_json()) == trunk
    assert "drawn" not in replace(trunk, drawn=None).to_json()
    with pytest.raises(InputError):
        Trunk.from_json({**trunk.to_json(), "drawn": {"temperature": -1.0}})


# the API and the command -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A target, prompts and two drafters on disk."""
    folder = tmp_path_factory.mktemp("toy")
    target = draftloop.load_target(toy_checkpoint(folder / "target"), dtype="float32", device="cpu")
    toy_prompts(folder / "test.jsonl", 6)
    for seed, name in enumerate(("one", "two")):
        part = DrafterPart(block_size=4, layers=1, target_layers=[0, 2 - seed])
        draftloop.save_drafter(new_drafter(spec_for(part, target), target, seed), folder / name, dtype=torch.float32)
    return folder, target


def test_drafters_are_compared_on_answers_drawn_once(toy, tmp_path, monkeypatch):
    folder, target = toy
    one, two = (draftloop.load_drafter(folder / name, target) for name in ("one", "two"))
    options = {"folder": tmp_path, "how": "offline", "max_new_tokens": 12, "temperature": 1.0, "top_k": 9}
    files = [str(folder / "test.jsonl")]
    found = draftloop.evaluate(target, one, files, against=[two, one], rule="ratio", **options)
    assert (found.how, found.speed, len(found.against)) == ("offline", None, 2)
    assert found.against[1][0] == found.acceptance
    assert found.against[1][1].difference == 0.0
    monkeypatch.setattr("draftloop.supervise.responses.decode", lambda *a: pytest.fail("answered again"))
    alone = draftloop.evaluate(target, two, files, rule="ratio", **options)
    assert alone.acceptance == found.against[0][0]
    monkeypatch.undo()
    matched = draftloop.evaluate(target, one, files, **options)
    real = draftloop.evaluate(target, one, files, **{**options, "how": "decode", "batch_size": 3})
    assert matched.acceptance == real.acceptance  # by match decoding writes these very answers
    draftloop.evaluate(target, one, files, **{**options, "temperature": 0.5})
    assert len(list(tmp_path.glob("*.jsonl"))) == 2
    greedy = draftloop.evaluate(target, one, files, **{**options, "temperature": 0.0})
    walked = draftloop.evaluate(target, one, files, folder=tmp_path, max_new_tokens=12)
    assert greedy.acceptance == walked.acceptance
    with pytest.raises(InputError, match="offline only"):
        draftloop.evaluate(target, one, files, folder=tmp_path, against=[two])


def test_the_command(toy, tmp_path, capsys):
    folder, _ = toy
    one, two = folder / "one", folder / "two"

    def call(*arguments):
        with pytest.raises(SystemExit) as done:
            main(["evaluate", *map(str, arguments), "--target", str(folder / "target"), "-p", str(folder / "test.jsonl"),
                  "--cache", str(tmp_path), "--max-new-tokens", "8", "--dtype", "float32"])  # fmt: skip
        return done.value.code or 0, *capsys.readouterr()

    status, out, _ = call(one, two, "--offline", "--temperature", "1", "--rule", "ratio", "--json")
    assert status == 0
    facts = json.loads(out)
    assert facts["how"] == "offline"
    (other,) = facts["against"]
    assert other["drafter"] == str(two)
    told = other["acceptance"]["tau_pooled"] - facts["acceptance"]["tau_pooled"]
    assert other["gain"]["difference"] == pytest.approx(told)
    status, out, _ = call(one, two, "--offline", "--temperature", "1", "--rule", "ratio")
    assert status == 0
    assert f"{other['gain']['difference']:+.3f}" in out.replace("\n", "")
    for wrong, says in (
        ([one, two], "offline only"),
        ([one, "--temperature", "1"], "--offline or --decode"),
        ([one, "--offline", "--decode"], "Give one of them"),
    ):
        status, out, err = call(*wrong)
        assert (status, out) == (2, "")
        assert says in err
