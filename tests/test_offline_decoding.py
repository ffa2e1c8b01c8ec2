"""The offline evaluation against real decoding; what it refuses; its command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import draftloop
from draftloop.cli import main
from draftloop.core.errors import InputError
from draftloop.core.law import Sampling
from draftloop.data.trunk import Trunk, response_trunk
from draftloop.decode.loop import decode
from draftloop.decode.trace import Options, Request
from draftloop.drafter.build import for_decoding, new_drafter
from draftloop.drafter.families import spec_for
from draftloop.evaluate import offline as room
from draftloop.evaluate.offline import offline
from draftloop.evaluate.tau import acceptance, paired
from draftloop.evaluate.walk import responses_of, walk
from draftloop.recipe import DrafterPart
from tests.lessons import BLOCK, DRAFTED, KINDS, LENGTH, Patchy, prompts, world
from tests.offline_parts import BROKEN, numbers
from tests.tiny import tiny_drafter, tiny_target
from tests.toy_run import toy_checkpoint, toy_prompts

pytestmark = pytest.mark.specopd


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


WRONG = [BROKEN[name] for name in ("p and q swapped", "one off at the end")]


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0), Sampling(1.0, 30, 0.9)], ids=str)
def test_by_ratio_it_is_what_real_steps_are_on_average(sampling, monkeypatch):
    """On the texts that this very decoding wrote: what is left of the noise is the drafts' and the coins'."""
    here = flat("llama")
    options = Options(LENGTH, sampling, "ratio", seed=8, batch_size=256)
    made, trunks = drawn(here, options, here.drafters[0], samples=60)
    real = counted(made, trunks)
    (told,) = offline(here.target, here.drafters[:1], trunks, options)
    assert surprise(real, told).max() < 3.5
    for part, wrong in WRONG:
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
                    for n in ("steps", "tau", "survivors", "refusals", "verified")
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
    monkeypatch.setattr("draftloop.supervise.responses.rounds", lambda *a: pytest.fail("answered again"))
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
        ([one, two], "several drafters are compared"),
        ([one, "--temperature", "1"], "--offline or --decode"),
        ([one, "--offline", "--decode"], "Give one of them"),
    ):
        status, out, err = call(*wrong)
        assert (status, out) == (2, "")
        assert says in err
