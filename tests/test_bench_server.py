"""`draftloop bench`: what a client sees of a server under load, and what the rows add up to."""

from __future__ import annotations

import json
import random
import time

import pytest

import draftloop.cli.bench  # noqa: F401  (registers the command)
from draftloop.cli import main
from draftloop.core.errors import EnvironmentFault
from draftloop.engines.bench import Arm, Ask, acceptance_counters, bench, counted_between
from draftloop.engines.bench_table import summarise
from draftloop.target.server import Server
from tests.fake_server import MODEL, Fake, serving
from tests.toy_run import toy_prompts

ASKS = [Ask(f"p{i}", messages=[{"role": "user", "content": f"question {i}"}]) for i in range(6)]


def load(url, name="speculative", asks=ASKS, **changes):
    rows = []
    options = {"concurrencies": [1, 2], "requests": 4, "max_new_tokens": 8, **changes}
    made = bench([Arm(name, Server(url), MODEL)], asks, write=rows.append, **options)
    assert made == rows
    return rows


def test_every_request_is_a_row_and_levels_ask_other_prompts():
    fake = Fake(pause_s=0.01)
    with serving(fake) as url:
        rows = load(url)
    done = [row for row in rows if row["kind"] == "request"]
    assert [row["kind"] for row in rows].count("level") == 2
    assert sorted(row["id"] for row in done) == sorted(f"p{i % 6}" for i in range(8))
    assert all(row["tokens"] == 10 and row["prompt_tokens"] == 3 and not row["error"] for row in done)
    assert all(len(row["gaps_ms"]) == 3 for row in done)
    for row in done:  # no more than a busy machine can keep
        assert row["ttft_s"] >= 0.01
        assert row["latency_s"] >= row["ttft_s"] + sum(row["gaps_ms"]) / 1e3 - 1e-4
        assert row["latency_s"] >= 0.04
    assert fake.most_under_way == 2
    for path, body in fake.seen:
        assert path == "/v1/chat/completions"
        assert body["temperature"] == 0
        assert body["max_tokens"] == 8
        assert body["stream_options"] == {"include_usage": True}
    one, two = summarise(rows)
    assert (one["concurrency"], two["concurrency"]) == (1, 2)
    assert one["tokens"] == two["tokens"] == 40
    assert one["tau"] == 1 + 2  # the counters' two accepted tokens a draft
    assert one["tau_from"] == "the server's counters"
    assert one["accepted_at"] == [2.0]


def test_token_ids_go_to_completions():
    fake = Fake()
    with serving(fake) as url:
        load(url, asks=[Ask("a", ids=[4, 5])], concurrencies=[1], requests=1)
    assert [(path, body["prompt"]) for path, body in fake.seen] == [("/v1/completions", [4, 5])] * 2


def test_tau_without_counters_is_read_from_pieces_or_not_told():
    with serving(Fake(counters=False)) as url:
        one, two = summarise(load(url))
    assert one["tau"] == 3  # 9 tokens in 3 pieces after the first
    assert one["tau_from"] == "tokens per streamed piece"
    assert two["tau"] is None
    assert two["tau_from"] == "the server does not tell"


def test_a_stream_that_breaks_off_is_a_failed_request():
    fake = Fake()
    with serving(fake) as url:
        rows, server = [], Server(url)

        def begin(row):
            rows.append(row)
            fake.drop_stream = len(rows) == 1  # the second request only

        bench([Arm("speculative", server, MODEL)], ASKS, concurrencies=[1], requests=3, max_new_tokens=8, write=begin)
        (one,) = summarise(rows)
        assert (one["failed"], one["requests"], one["tokens"]) == (1, 3, 20)
        fake.dies_after = 0
        with pytest.raises(EnvironmentFault, match="does not answer"):
            load(url)


def test_a_level_that_fails_throughout_ends_the_bench():
    fake = Fake(dies_after=1)  # the warm-up, then nothing
    with serving(fake) as url, pytest.raises(EnvironmentFault, match="all 4 requests failed"):
        load(url, concurrencies=[1])


def test_counters_are_summed_over_engines_and_differences_taken():
    page = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="1"} 1.79e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 3e1
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 4
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="10"} 2
"""
    after = acceptance_counters(page)
    assert after == {"drafts": 15, "accepted": 30, "accepted_at": {"0": 13, "10": 2}}
    before = {"drafts": 5, "accepted": 10, "accepted_at": {"0": 3}}
    assert counted_between(before, after) == {"drafts": 10, "accepted": 20, "accepted_at": {"0": 10, "10": 2}}
    assert counted_between({}, acceptance_counters('sglang:spec_accept_length{a="b"} 2.5')) == {"accept_length": 2.5}
    assert acceptance_counters(None) == {}


def test_summary_against_a_count_by_hand():
    draw = random.Random(3)
    rows = []
    for arm in ("plain", "speculative"):
        for i in range(40):
            gaps = [draw.uniform(1, 9) for _ in range(draw.randint(1, 5))]
            row = {"kind": "request", "arm": arm, "concurrency": 4, "error": "x" if i % 10 == 0 else ""}
            rows.append({**row, "tokens": len(gaps) + 1, "ttft_s": draw.random(), "gaps_ms": gaps, "latency_s": 1})
        counters = {"drafts": 100, "accepted": 150, "accepted_at": {"0": 90, "1": 60}} if arm != "plain" else {}
        rows.append({"kind": "level", "arm": arm, "concurrency": 4, "seconds": 2.0, "counters": counters})
    plain, drafted = summarise(rows)
    good = [row for row in rows if row["kind"] == "request" and row["arm"] == "plain" and not row["error"]]
    assert plain["failed"] == 4
    assert plain["tokens_per_s"] == sum(row["tokens"] for row in good) / 2
    firsts = sorted(1e3 * row["ttft_s"] for row in good)
    assert plain["ttft_ms"]["p50"] == firsts[17]
    for p, value in plain["ttft_ms"].items():
        share = int(p[1:]) / 100
        assert sum(x <= value for x in firsts) >= share * 36 > sum(x < value for x in firsts)
    assert drafted["tau"] == 2.5
    assert drafted["accepted_at"] == [0.9, 0.6]
    assert drafted["speedup"] == drafted["tokens_per_s"] / plain["tokens_per_s"]
    assert plain["tau"] is None
    assert plain["speedup"] is None


def test_the_command_compares_two_servers_and_writes_raw_rows(tmp_path, capsys):
    prompts = toy_prompts(tmp_path / "p.jsonl", 4)
    with serving(Fake(pause_s=0.01, pieces=("a",) * 8, counters=False)) as plain, serving(Fake()) as fast:
        command = ["bench", "--url", fast, "--plain-url", plain, "-p", str(prompts), "-c", "2", "--requests", "4"]
        with pytest.raises(SystemExit) as done:
            main([*command, "--out", str(tmp_path / "rows.jsonl"), "--json"])
        assert done.value.code == 0
        found = json.loads(capsys.readouterr().out)["levels"]
        assert [one["arm"] for one in found] == ["plain", "speculative"]
        assert found[1]["speedup"] > 1
        rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
        assert rows[0]["kind"] == "bench"
        assert summarise(rows[1:]) == summarise(rows) == found
        with pytest.raises(SystemExit):
            main(command)
        told = capsys.readouterr().out
        assert "tokens/s" in told
        assert "counters" in told


def test_rows_of_an_earlier_bench_are_not_overwritten(tmp_path, capsys):
    prompts, kept = toy_prompts(tmp_path / "p.jsonl", 2), tmp_path / "rows.jsonl"
    kept.write_text("precious\n", encoding="utf-8")
    with serving(Fake()) as url:
        for out, code in ((kept, 2), (tmp_path / "new.jsonl", 0)):
            with pytest.raises(SystemExit) as done:
                main(["bench", "--url", url, "-p", str(prompts), "-c", "1", "--requests", "1", "--out", str(out)])
            assert int(done.value.code or 0) == code
    assert kept.read_text(encoding="utf-8") == "precious\n"
    assert "not overwritten" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_sentence(tmp_path, capsys):
    start = time.monotonic()
    with pytest.raises(SystemExit) as done:
        main(["bench", "--url", "http://127.0.0.1:9/v1", "-p", str(toy_prompts(tmp_path / "p.jsonl", 2))])
    assert done.value.code == 3
    assert time.monotonic() - start < 8
    assert "http://127.0.0.1:9/v1: the server does not answer" in capsys.readouterr().err
