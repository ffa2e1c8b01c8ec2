"""Running the vLLM worker: a child process in the engine's own Python, watched until its rows are written.

Knows files and processes; what the rows mean is in `compare`. The child dies with us, and if it dies by itself its last
words are passed on within seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from draftloop.core.errors import EnvironmentFault, InputError
from draftloop.core.files import fingerprint, sha256_file, write_json
from draftloop.engines.serve import Engine

WORKER = Path(__file__).with_name("vllm_worker.py")
PYTHON = "DRAFTLOOP_VLLM_PYTHON"  # the environment variable that names the engine's interpreter

_POLL_S, _STOP_S = 0.2, 10.0
# what vLLM 0.32 says where its CPU build lacks a kernel -> what to do
_KNOWN = {
    "CPU GDN attention requires BF16": "vLLM's CPU build computes Gated DeltaNet in bfloat16 only: --dtype bfloat16.",
    "Unexpected head dim size": "vLLM's CPU build takes no Gated DeltaNet heads of this size: use a GPU.",
    "is not supported by MLA": "vLLM's CPU build takes latents of DeepSeek's own size only: kv_lora_rank 512, rope 64.",
    "Model Runner V1 does not support": "vLLM needs Triton for this family, and its CPU build has none: use a GPU.",
    "No module named 'torchvision'": "vLLM's Qwen3.5 needs torchvision: install the build for the engine's torch.",
}
# One process (a step is then a call), no look at the hub: everything is on this disk.
_ALWAYS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # ours would shadow the engine's packages


@dataclass(frozen=True)
class Ask:
    """One prompt at one temperature.

    Attributes:
        name: unique within a job; rows are resumed by it.
        ids: prompt tokens.
        temperature: 0 = greedy.
        seed: of the engine's own generator.
    """

    name: str
    ids: tuple[int, ...]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Job:
    """What the engine is started with.

    Attributes:
        target: folder (or hub id) of the target.
        drafter: folder of the drafter as the engine is to read it; of an MTP head, which it reads out of the target's
            folder, where that head came from.
        num_speculative_tokens: K.
        draft_sample_method: greedy (drafts are the argmax) or probabilistic (drawn from the drafter's law).
        dtype: float32 or bfloat16.
        max_new_tokens: length limit of a response.
        max_model_len: longest text; must leave room for a last block.
        eos: tokens that end a response.
        method: vLLM's name of the drafter's family.
        lookup: for n-gram lookup, fewest and most tokens looked for; it has no folder, and not every step drafts.
    """

    target: str
    drafter: str
    num_speculative_tokens: int
    draft_sample_method: Literal["greedy", "probabilistic"]
    dtype: str
    max_new_tokens: int
    max_model_len: int
    eos: tuple[int, ...]
    method: str = "dflash"
    lookup: tuple[int, int] | None = None


def chosen_python(given: Path | None) -> Path:
    """The interpreter that the user named, by option or environment.

    Raises:
        InputError: neither.
    """
    named = given or (Path(os.environ[PYTHON]) if os.environ.get(PYTHON) else None)
    if named is None:
        fix = f"Give --engine-python PATH, or set {PYTHON}; benchmarks/setup_vllm_cpu.sh makes one for the CPU."
        raise InputError("no Python of an environment with vLLM was named", where="--engine-python", fix=fix)
    return named


def run_job(
    engine: Engine,
    job: Job,
    asks: Sequence[Ask],
    folder: Path,
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """Have the engine answer; rows of an earlier, interrupted call are kept.

    Args:
        engine: from `find_engine`.
        job: how the engine is started.
        asks: prompts, answered one at a time in this order.
        folder: where rows, job and log are kept.
        advance: called with (rows done, rows in all).

    Returns:
        every row of the file: `engine` (versions), `row` (one an ask), `end` (counters).

    Raises:
        EnvironmentFault: the engine died, or did not write every row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"engine-{fingerprint(asdict(job), [asdict(ask) for ask in asks], weights_of(Path(job.drafter)))}"
    rows, log = folder / f"{stem}.jsonl", folder / f"{stem}.log"
    wanted = {ask.name for ask in asks}
    if _done(rows, wanted) < len(wanted):
        note = folder / f"{stem}.job.json"
        write_json(note, {**asdict(job), "requests": [asdict(ask) for ask in asks], "out": str(rows.resolve())})
        _watch(engine, note, log, lambda: advance(_done(rows, wanted), len(wanted)))
    advance(_done(rows, wanted), len(wanted))
    if _done(rows, wanted) < len(wanted):
        raise EnvironmentFault("the engine ended before every prompt was answered", where=str(log), fix=_look(log))
    return read_rows(rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines of a file that may be being written."""
    found: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                found.append(json.loads(line))
            except ValueError:
                break
    return found


def environment(engine: Engine) -> dict[str, str]:
    """What the child sees: ours, without what is about our Python, with what the engine needs."""
    inherited = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    return {**_ALWAYS, "VLLM_LOGGING_LEVEL": "WARNING", **inherited, **engine.environment, **_ALWAYS}


def weights_of(folder: Path) -> str:
    """A name for a checkpoint folder's content: the SHA-256 of its weights and configuration."""
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("config.json"))
    return " ".join(f"{file.name}:{sha256_file(file)[:16]}" for file in files)


def _done(rows: Path, wanted: set[str]) -> int:
    return len({row["name"] for row in read_rows(rows) if row.get("kind") == "row"} & wanted)


def _watch(engine: Engine, note: Path, log: Path, look: Callable[[], None]) -> None:
    """Run the worker to its end, looking at its rows; leave no process behind."""
    with open(log, "w", encoding="utf-8") as handle:
        try:
            child = subprocess.Popen(
                [str(engine.python), str(WORKER), str(note)],
                stdout=handle,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(engine),
                start_new_session=True,  # its own children end with it
            )
        except OSError as error:
            raise EnvironmentFault(
                f"the engine cannot be started ({error.strerror})", where=str(engine.python)
            ) from error
        try:
            while child.poll() is None:
                look()
                time.sleep(_POLL_S)
        finally:
            _stop(child)
    if child.returncode != 0:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
        raise EnvironmentFault(f"vLLM ended with {how} ({_last_words(log)})", where=str(log), fix=_look(log))


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the worker and what it started, politely first."""
    for number, patience in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, None)):
        if child.poll() is None:
            try:
                os.killpg(child.pid, number)
                child.wait(patience)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def _last_words(log: Path) -> str:
    """The worker's own error line, else the last line of its log."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith('{"error"'):
            return str(json.loads(line)["error"]).rstrip(".")
    return lines[-1][:200].rstrip(".") if lines else "it said nothing"


def _look(log: Path) -> str:
    said = _last_words(log)
    for words, fix in _KNOWN.items():
        if words in said:
            return fix
    return f"The same command goes on where it was; the engine's log is {log.name}."
