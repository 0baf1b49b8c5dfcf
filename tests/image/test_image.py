"""What scripts/image.py decides without an engine: arguments, labels, budget."""

import json
from pathlib import Path
from typing import Any

import pytest
from image import Request, archive_words, build_words, check_facts, labels_of, read_stack

from tests.helpers.programs import program
from tests.helpers.refusals import refused

FACTS: dict[str, Any] = {"python": "3.12.13", "torch": "2.9.1", "torchaudio": "2.9.1", "triton": "3.5.1"}
FACTS |= {"cuda": "12.8", "cudnn": "9.10.2", "nccl": "2.27.5", "torchvision": "0.24.1", "trainer": "0.1.0"}
FACTS |= {"compiler": "g++ 14.4.0", "architectures": [f"sm_{n}" for n in (70, 75, 80, 86, 90, 100, 120)]}
STACK = "torch2.9-cu128"


def test_the_stack_gives_the_arguments() -> None:
    words = build_words(Request(STACK, "train"), read_stack(STACK), {})
    assert "TORCH_VERSION=2.9.1" in words and "DRIVER=525.60.13" in words
    assert "ALLOW_MD5=" in words
    assert not [word for word in words if word.startswith("--build-context") or "CONDA_MIRROR" in word]
    old = build_words(Request("pytorch-cuda-11.8", "dev"), read_stack("pytorch-cuda-11.8"), {})
    assert "ALLOW_MD5=libcufile libcurand" in old
    assert "TORCH_VERSION=2.5.1" in old


def test_a_stand_in_replaces_both_bases_and_is_told() -> None:
    request, stack = Request(STACK, "train", "standin/base"), read_stack(STACK)
    words = build_words(request, stack, {})
    replaced = [word for word in words if word.endswith("=docker-image://standin/base")]
    assert [word.split("=")[0] for word in replaced] == ["conda-base", "debian-base"]
    labels = labels_of(request, stack, "abc")
    assert labels["trainer.stand-in"] == "both bases" and "trainer.python" not in labels


def test_the_archive_depends_on_the_sources_alone() -> None:
    stack = {**read_stack(STACK), "source_date_epoch": 1795219200}
    words = archive_words(Request(STACK, "train"), stack, {"a": "b"}, Path("f.tar"))
    assert "SOURCE_DATE_EPOCH=1795219200" in words
    assert "--provenance=false" in words
    made = words[words.index("--output") + 1].split(",")
    assert "rewrite-timestamp=true" in made
    assert "force-compression=true" in made  # not as an earlier build left a layer in the cache


def test_labels_say_what_the_stack_is() -> None:
    stack = {**read_stack(STACK), "source_date_epoch": 1795219200}
    labels = labels_of(Request(STACK, "dev"), stack, "abc")
    assert (labels["trainer.cuda"], labels["trainer.python"]) == ("12.8", "3.12")
    assert labels["org.opencontainers.image.revision"] == "abc"
    assert labels["org.opencontainers.image.created"] == "2026-11-21T00:00:00Z"
    assert labels["trainer.driver"] == ">=525.60.13"


def test_a_build_gets_proxies_by_their_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values, passwords among them, would stand in the list of processes."""
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hushed@host:1")
    monkeypatch.setenv("no_proxy", "")
    words = build_words(Request(STACK, "train"), read_stack(STACK), {})
    assert "--build-arg=HTTPS_PROXY" in words and "--build-arg=no_proxy" not in words
    assert "hushed" not in " ".join(words)


def test_an_image_that_isnt_its_stack_loses_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts, gone = tmp_path / "facts", tmp_path / "gone"
    case = f'case $1 in run) cat "{facts}" ;; rmi) echo "$2" >>"{gone}" ;; esac'
    program(tmp_path / "docker", f"#!/bin/sh\n{case}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stack, request = read_stack(STACK), Request(STACK, "train")
    facts.write_text(json.dumps(FACTS))
    check_facts(request, stack)
    assert not gone.exists()
    for other in ({"cuda": "12.9"}, {"torch": "2.9.0"}):
        facts.write_text(json.dumps(FACTS | other))
        with refused(*other, *other.values()):
            check_facts(request, stack)
        assert gone.read_text() == f"trainer:{STACK}-train\n"
        gone.unlink()
