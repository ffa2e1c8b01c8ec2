"""Each thing that can be wrong with a machine, faked, must show in the doctor's findings, with a fix."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import shutil
import warnings
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from draftloop import doctor
from draftloop.doctor import Finding, diagnose, healthy, render
from draftloop.target import embedded


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "cache"


def named(findings: list[Finding], name: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding


def test_a_sound_machine_is_healthy_and_nothing_is_written(own_cache):
    findings = diagnose()
    assert healthy(findings), render(findings)
    names = [finding.name for finding in findings]
    assert names[:4] == ["python", "torch", "transformers", "other packages"]
    assert {"cpu", "cuda", "cache folder", "disk", "default target", "pip", "attention cpu"} <= set(names)
    assert len(set(names)) == len(names)
    assert named(findings, "attention cpu").status == "ok"
    assert named(findings, "default target").status == "warn"
    assert not own_cache.exists()
    assert json.loads(json.dumps([asdict(finding) for finding in findings]))[0].keys() == {
        "name",
        "status",
        "detail",
        "fix",
    }


def test_every_obstacle_names_a_fix(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    monkeypatch.setattr(doctor, "MIN_PYTHON", (9, 0))
    monkeypatch.setattr(doctor, "MIN_MEMORY", 1e18)
    monkeypatch.setattr(doctor, "MIN_DISK", 1e18)
    findings = diagnose()
    assert all(bool(finding.fix) == (finding.status != "ok") for finding in findings)
    for name in ("python", "torch", "transformers", "other packages"):
        assert named(findings, name).status == "fail"
    assert "safetensors 0.0.1 (needed: >=0.5)" in named(findings, "other packages").detail
    assert "pytest" not in named(findings, "other packages").detail, "the developers' extras are not required"
    assert named(findings, "cpu").status == named(findings, "disk").status == "warn"
    assert not healthy(findings)


def test_a_missing_package(monkeypatch):
    version = importlib.metadata.version

    def without_gguf(name: str) -> str:
        if name == "gguf":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_gguf)
    finding = named(diagnose(), "other packages")
    assert finding.status == "fail"
    assert finding.detail.startswith("gguf not installed")


def test_run_from_a_folder_without_an_install(monkeypatch):
    def none(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", none)
    assert named(diagnose(), "packages").status == "warn"


@pytest.mark.parametrize("error", [ImportError("no torch"), OSError("libgomp.so.1: cannot open\nmore")])
def test_a_torch_that_cannot_be_imported(monkeypatch, error):
    def broken(name: str) -> None:
        raise error

    monkeypatch.setattr(importlib, "import_module", broken)
    findings = diagnose()
    assert named(findings, "torch import").detail == str(error).splitlines()[0]
    assert named(findings, "disk").status == "ok"
    assert not healthy(findings)


def without_the_mask(q, k, v, attn_mask=None):
    return torch.softmax(q @ k.mT / 16**0.5, -1) @ v


def with_an_additive_mask(q, k, v, attn_mask=None):
    return torch.softmax(q @ k.mT / 16**0.5 + attn_mask, -1) @ v


def turned_around(q, k, v, attn_mask=None):
    return REAL(q, k, v, attn_mask=~attn_mask)


def of_one_row(q, k, v, attn_mask=None):
    return REAL(q, k, v, attn_mask=attn_mask[:1])


def causal(q, k, v, attn_mask=None):
    return REAL(q, k, v, is_causal=True)


def raising(q, k, v, attn_mask=None):
    raise RuntimeError("no kernel\nmore")


REAL = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("wrong", [without_the_mask, with_an_additive_mask, turned_around, of_one_row, causal, raising])
def test_attention_that_does_not_obey_the_mask(monkeypatch, wrong):
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    finding = named(diagnose(), "attention cpu")
    assert finding.status == "fail"
    assert "\n" not in finding.detail


def test_a_cache_that_cannot_be_written(own_cache, monkeypatch):
    own_cache.write_text("a file")
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(own_cache / "below"))
    finding = named(diagnose(), "cache folder")
    assert finding.status == "fail"
    assert embedded.CACHE_VARIABLE in finding.fix
    monkeypatch.setattr(doctor, "embedded_fault", lambda cache=None: "")
    assert named(diagnose(), "cache folder").status == "warn", "a target that is there can be read all the same"


def test_a_full_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e8))
    assert named(diagnose(), "disk").status == "fail"
    monkeypatch.setattr(doctor, "embedded_fault", lambda cache=None: "")
    assert named(diagnose(), "disk").status == "warn"


def test_a_damaged_target(own_cache):
    (own_cache / embedded.FOLDER).mkdir(parents=True)
    finding = named(diagnose(), "default target")
    assert finding.status == "warn"
    assert embedded.MANIFEST in finding.detail


def test_no_pip_matters_only_without_the_target(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else find(name, *rest))
    assert "ensurepip" in named(diagnose(), "pip").fix
    monkeypatch.setattr(doctor, "embedded_fault", lambda cache=None: "")
    assert named(diagnose(), "pip").status == "ok"


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    finding = named(diagnose(), "cuda")
    assert finding.status == "warn"
    assert "CUDA build" in finding.fix

    def too_old() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old\n(found version 1)", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", too_old)
    finding = named(diagnose(), "cuda")
    assert finding.detail == "The NVIDIA driver on your system is too old"
    assert "driver" in finding.fix


def test_rendering():
    good, odd, bad = Finding("a", "ok", "x"), Finding("bb", "warn", "y", "Do."), Finding("c", "fail", "z", "Mend.")
    assert render([good]).splitlines() == ["ok    a  x", "Ready."]
    assert render([good, odd]).splitlines()[-2:] == ["          -> Do.", "Ready, with 1 warning."]
    assert render([good, odd, bad]).splitlines()[-1] == "1 of 3 checks failed: mend these first."
    assert healthy([good, odd])
    assert not healthy([odd, bad])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_flex_attention_agrees_on_a_gpu(monkeypatch):
    monkeypatch.undo()  # here CUDA is there
    assert doctor.flex_error(torch.device("cuda")) < doctor.TOLERANCE
    assert doctor.sdpa_error(torch.device("cuda")) < doctor.TOLERANCE
