"""The engine of fixed shapes against the eager loop: same tokens, same trace, same records; on the CPU without a graph."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.law import Sampling
from draftloop.decode import fixed, graph, loop
from draftloop.decode.graph import GraphEngine
from draftloop.decode.loop import Decoder, decode, engine_of, rounds
from draftloop.decode.trace import Generation, Options
from draftloop.target.fixed import FixedCache, _attend
from draftloop.target.load import load_target
from tests.stand_ins import EOS, WAYS, requests_of, scripts_of, trained_drafter, with_eos
from tests.tiny import tiny_drafter, tiny_model, tiny_target


@pytest.fixture(scope="module")
def target():
    return with_eos(tiny_target(), *EOS)


@pytest.fixture(scope="module")
def requests(target):
    return requests_of([1, 2, 3, 5, 5, 8, 8, 9, 11, 13, 14, 23], target.vocab_size, seed=4)


@pytest.fixture(scope="module")
def half_learned(target, requests):
    return trained_drafter(target, scripts_of(target, requests, Options(max_new_tokens=16))[4:], steps=25)


def trace(made: Generation):
    return made.tokens, made.finished, [(s.anchor, s.proposed, s.accepted, s.committed) for s in made.steps]


def agree(eager: list[Generation], fast: list[Generation]) -> None:
    assert [trace(made) for made in fast] == [trace(made) for made in eager]
    for one, other in zip(eager, fast, strict=True):
        for mine, theirs in zip(one.steps, other.steps, strict=True):
            assert torch.allclose(torch.tensor(mine.log_q), torch.tensor(theirs.log_q), atol=1e-4)
        for name in ("features", "hidden", "verified"):
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None), name
            if a is not None:
                assert a.shape == b.shape
                assert float((a - b).abs().max()) < 1e-4 * float(a.abs().max()), name


@pytest.mark.parametrize("way", WAYS)
def test_it_decodes_what_the_eager_loop_decodes(target, requests, half_learned, way):
    """Fewer rows than requests, so that rows are refilled; some end early, some at the limit."""
    options = Options(max_new_tokens=14, seed=9, batch_size=5, record=way in ("greedy", "ratio"), **WAYS[way])
    for drafter in (None, half_learned):
        eager = decode(target, drafter, requests, replace(options, engine="eager"))
        agree(eager, decode(target, drafter, requests, replace(options, engine="graph")))
        assert 0 < sum(made.finished for made in eager) < len(eager)


@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    rows=st.integers(1, 6),
    limit=st.integers(1, 18),
    every=st.integers(1, 5),
    drafting=st.booleans(),
    way=st.sampled_from(sorted(WAYS)),
)
def test_however_rows_are_refilled_and_logs_are_read(target, lengths, rows, limit, every, drafting, way):
    asked = requests_of(lengths, target.vocab_size, seed=7)
    drafter = tiny_drafter(target, block=3) if drafting else None
    options = Options(max_new_tokens=limit, batch_size=rows, **WAYS[way])
    before = graph.LOOK_EVERY
    graph.LOOK_EVERY = every
    try:
        fast = decode(target, drafter, asked, replace(options, engine="graph"))
    finally:
        graph.LOOK_EVERY = before
    agree(decode(target, drafter, asked, options), fast)


@pytest.mark.parametrize(("kind", "changes"), [("qwen3", {}), ("phi", {}), ("mistral", {"sliding_window": 5})])
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_other_kinds_of_attention(kind, changes, kernel):
    target = with_eos(tiny_target(kind, **changes), *EOS)
    asked = requests_of([1, 4, 9, 12], target.vocab_size, seed=6)
    options = Options(max_new_tokens=10, sampling=Sampling(1.0), rule="ratio", batch_size=3)
    drafter = tiny_drafter(target, block=3)
    engine = GraphEngine(target, drafter, options, rows=3, longest=22, kernel=kernel)
    made = [Generation(request.ids) for request in asked]
    list(engine.decode(asked, made))
    agree(decode(target, drafter, asked, options), made)


@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_float16_scores_that_exceed_it_before_they_are_scaled(kernel):
    """Keys with a large bias, as Qwen2's: fails if products of float16 are scaled when they have overflowed."""
    made = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 64, generator=made) for heads in (4, 2, 2))
    query, key = (query + 40).half(), (key + 40).half()  # 64 * 40 * 40 is beyond float16, an eighth of it is not
    seen = torch.ones(9, 9, dtype=torch.bool).tril().view(1, 1, 9, 9)
    kept = FixedCache(1, 1, 9, 2, query)
    kept.kernel = kernel
    found, _ = _attend(torch.nn.Module(), query, key, value.half(), kept.fit(seen), kernel=kernel)
    key, value = (one.double().repeat_interleave(2, 1) for one in (key, value.half()))
    want = torch.nn.functional.scaled_dot_product_attention(query.double(), key, value, attn_mask=seen).transpose(1, 2)
    assert bool(found.isfinite().all())
    # the scores' own rounding, to 8 of some 13000, is what float16 has; a single key is exact
    assert float((found[:, 0] - want[:, 0]).abs().max()) < 1e-3


def test_layers_of_two_kinds():
    """Full and sliding layers side by side: one mask for each."""
    target = with_eos(tiny_target("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=2), *EOS)
    assert len(target.family.kinds) == 2
    asked = requests_of([1, 4, 9, 12], target.vocab_size, seed=6)
    options = Options(max_new_tokens=10, batch_size=3)
    agree(decode(target, None, asked, options), decode(target, None, asked, replace(options, engine="graph")))


def test_one_engine_serves_many_calls(target, requests, half_learned):
    options = Options(max_new_tokens=9, batch_size=4, engine="graph")
    decoder = Decoder(target, half_learned, options, requests)
    for asked in (requests[:3], requests[3:], requests[:1], []):
        made = [Generation(request.ids) for request in asked]
        list(decoder.rounds(asked, made))
        agree(decode(target, half_learned, asked, replace(options, engine="eager")), made)


def test_a_call_that_another_took_the_rows_from_says_so(target, requests):
    """Two generators of one engine share its rows. Fails if the first goes on with the second's texts."""
    options = Options(max_new_tokens=40, batch_size=2, engine="graph")
    decoder = Decoder(target, None, options, requests)
    first, second = ([Generation(request.ids) for request in requests[:3]] for _ in range(2))
    one, two = decoder.rounds(requests[:3], first), decoder.rounds(requests[:3], second)
    next(one)
    next(two)
    with pytest.raises(InputError, match="another call.*Decoder"):
        list(one)
    list(two)
    agree(decode(target, None, requests[:3], replace(options, engine="eager")), second)


def test_it_streams_what_it_decodes(target, requests, half_learned):
    options = Options(max_new_tokens=9, sampling=Sampling(1.0), batch_size=3, engine="graph")
    made = [Generation(request.ids) for request in requests]
    streamed: list[list[int]] = [[] for _ in requests]
    done = []
    for commits in rounds(target, half_learned, requests, options, made):
        assert commits
        assert len({commit.index for commit in commits}) == len(commits)
        for commit in commits:
            assert commit.index not in done
            streamed[commit.index] += commit.tokens
            done += [commit.index] if commit.done else []
    assert streamed == [one.tokens for one in made]
    assert sorted(done) == list(range(len(requests)))


def test_records_share_no_memory(target, requests, half_learned):
    options = Options(max_new_tokens=6, record=True, engine="graph")
    one, two, *_ = [made for made in decode(target, half_learned, requests[:6], options) if made.steps]
    for name in ("features", "hidden", "verified"):
        before = getattr(two, name).clone()
        getattr(one, name).zero_()
        assert torch.equal(getattr(two, name), before)


def test_idle_rows_leave_no_trace(target, requests):
    """Whatever stands in an idle row's memory, the rows beside it decode the same."""
    options = Options(max_new_tokens=8, batch_size=4)
    engine = GraphEngine(target, None, options, rows=4, longest=40)
    for garbage in (0.0, 50.0):
        for layer in engine.rows.cache.layers:
            if layer.is_initialized:
                layer.keys.fill_(garbage)
        made = [Generation(request.ids) for request in requests[:3]]
        list(engine.decode(requests[:3], made))
        agree(decode(target, None, requests[:3], options), made)


@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
@pytest.mark.parametrize("way", ["greedy", "ratio"])
def test_what_the_last_text_left_in_a_row_is_gone(target, requests, half_learned, way, kernel):
    """A text whose states overflowed spoils no later one. Fails if target's or drafter's cache keeps its numbers."""
    options = Options(max_new_tokens=8, batch_size=2, **WAYS[way])
    for drafter in (None, half_learned):
        engine = GraphEngine(target, drafter, options, rows=2, longest=40, kernel=kernel)
        held = [part for layer in engine.rows.cache.layers for part in (layer.keys, layer.values)]
        if drafter is not None:
            held += [*engine.rows.context._keys, *engine.rows.context._values]
        for part in held:
            part.fill_(float("nan"))
        made = [Generation(request.ids) for request in requests[:5]]
        list(engine.decode(requests[:5], made))
        agree(decode(target, drafter, requests[:5], options), made)


def test_a_text_may_fill_the_context_to_the_last_token(target):
    asked = requests_of([target.context_limit - 9, target.context_limit - 12], target.vocab_size)
    options = Options(max_new_tokens=9)
    plain = decode(with_eos(target), None, asked, options)
    for drafter in (None, tiny_drafter(target)):
        fast = decode(with_eos(target), drafter, asked, replace(options, engine="graph"))
        assert [made.tokens for made in fast] == [made.tokens for made in plain]


@pytest.mark.parametrize("part", ["stop", "mask", "position"])
def test_a_broken_round_is_caught(monkeypatch, target, requests, half_learned, part):
    """What the equality above would miss, it does not miss these."""
    if part == "stop":  # idle rows go on
        monkeypatch.setattr(torch.Tensor, "masked_fill", lambda self, mask, value: self)
    elif part == "mask":  # a query does not see itself
        honest = fixed.RowState.play
        monkeypatch.setattr(
            type(target.new_fixed_cache(1, 8)),
            "aim",
            lambda self, positions: (
                setattr(self, "slots", positions)
                or (torch.arange(self.span) <= (positions - 1).clamp(min=0).unsqueeze(-1)).unsqueeze(1)
            ),
        )
        assert honest is fixed.RowState.play
    else:  # refilled rows keep the last text's place
        honest_admit = fixed.FixedRows.admit

        def careless(self, rows, asked):
            first = honest_admit(self, rows, asked)
            self.anchor[rows[0]] -= 1
            return first

        monkeypatch.setattr(fixed.FixedRows, "admit", careless)
    options = Options(max_new_tokens=14, seed=9, batch_size=5, **WAYS["match"])
    eager = decode(target, half_learned, requests, options)
    with pytest.raises(AssertionError):
        agree(eager, decode(target, half_learned, requests, replace(options, engine="graph")))


# what a capture forbids, seen on the CPU -----------------------------------------------------------------------------
class Watching(TorchDispatchMode):
    """Notes what would stop a capture on CUDA: a value that the host reads, or a tensor that the host makes."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "equal.default", "item")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        if any(name == word or name.startswith((word + ".", word + "_dim")) for word in self.FORBIDDEN):
            self.seen.append(name)
        if name.startswith("index") and any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool for arg in args if isinstance(arg, (list, tuple))
            for one in arg
        ):  # fmt: skip
            self.seen.append(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
@pytest.mark.parametrize("way", WAYS)
def test_a_round_asks_the_device_for_nothing(target, half_learned, way, kernel):
    for drafter in (None, half_learned):
        options = Options(8, record=True, **WAYS[way])
        engine = GraphEngine(target, drafter, options, rows=3, longest=40, kernel=kernel)
        engine.turn()
        engine.rows.at.zero_()
        with Watching() as watching:
            engine.turn()
        assert watching.seen == []


def test_the_watcher_sees_what_it_should():
    x = torch.arange(4)
    for sin in (lambda: int(x.max()), lambda: x[x > 1], lambda: torch.tensor([1, 2]), lambda: bool((x > 1).any())):
        with Watching() as watching:
            sin()
        assert watching.seen


# which engine, and what is refused -----------------------------------------------------------------------------------
def test_the_engine_is_the_options_then_the_targets_then_the_devices(target):
    twin = with_eos(target, *EOS)
    assert engine_of(twin, None, Options()) == "eager"  # a CPU
    twin.engine = "graph"
    assert engine_of(twin, None, Options()) == "graph"
    assert engine_of(twin, None, Options(engine="eager")) == "eager"
    with pytest.raises(InputError, match="no engine 'quick'"):
        Options(engine="quick")


@pytest.mark.parametrize(("engine", "says"), [("graph", "a CPU has no CUDA graphs"), ("fused", "minutes on a CPU")])
@pytest.mark.parametrize("by_target", [False, True])
def test_an_engine_made_for_a_gpu_says_on_a_cpu_what_it_does(requests, engine, says, by_target):
    """Before anything is built, once; `eager` says nothing. Fails if `Target.engine` (a recipe's) is not looked at."""
    twin, options = with_eos(tiny_target(), *EOS), Options(max_new_tokens=9, engine="auto" if by_target else engine)
    twin.engine = engine
    loop._tell.cache_clear()
    with pytest.warns(UserWarning, match=says):
        Decoder(twin, None, options, requests)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(twin, None, options, requests)
        loop._tell.cache_clear()
        Decoder(twin, None, replace(options, engine="eager"), requests)


def test_positions_that_change_with_the_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    target = load_target(tiny_model(rope_parameters=rope))
    with pytest.raises(InputError, match=r"rotary positions \(dynamic\).*engine eager"):
        decode(target, None, requests_of([4], 61), Options(8, engine="graph"))


def test_a_drafter_without_fixed_shapes_is_refused(target, requests):
    from tests.stand_ins import Scripted

    script = Scripted(target, [[]] * len(requests), 3)
    with pytest.raises(InputError, match="the drafter has no cache of fixed size"):
        decode(target, script, requests, Options(8, engine="graph"))


# compiled layers -----------------------------------------------------------------------------------------------------
class Counting:
    """A compiler's backend that compiles nothing and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module, inputs):
        self.graphs += 1
        return module.forward


def test_a_layer_is_compiled_once_for_all_layers(requests):
    target = with_eos(tiny_target(layers=7), *EOS)
    options = Options(max_new_tokens=8, batch_size=4)
    counting = Counting()
    compiler = partial(torch.compile, dynamic=False, backend=counting)
    engine = GraphEngine(target, None, options, rows=4, longest=40, kernel="matmul", compiler=compiler)
    made = [Generation(request.ids) for request in requests]
    list(engine.decode(requests, made))
    agree(decode(target, None, requests, options), made)
    # a layer, rotary positions, the last norm; drafts that match, what is committed, the log
    assert counting.graphs == 6
    assert all("forward" not in vars(layer) for layer in target._layers)
    assert target.config._attn_implementation == "sdpa"


def test_a_compiled_round_speculates_the_same(target, requests, half_learned):
    options = Options(max_new_tokens=8, sampling=Sampling(1.0), rule="ratio", batch_size=4)
    counting = Counting()
    compiler = partial(torch.compile, dynamic=False, backend=counting)
    engine = GraphEngine(target, half_learned, options, rows=4, longest=40, compiler=compiler)
    made = [Generation(request.ids) for request in requests]
    list(engine.decode(requests, made))
    agree(decode(target, half_learned, requests, options), made)
    assert counting.graphs <= 12  # those but for the matches, the drafter's two forwards, a hash for each purpose


def test_a_compiler_that_fails_is_one_sentence(target, requests):
    def failing(module, inputs):
        raise RuntimeError("no ptxas\nand a long story")

    compiler = partial(torch.compile, dynamic=False, backend=failing)
    with pytest.raises(EnvironmentFault, match=r"cannot be compiled.*no ptxas.*engine graph") as caught:
        GraphEngine(target, None, Options(), rows=1, longest=280, compiler=compiler)
    assert "\n" not in str(caught.value)
