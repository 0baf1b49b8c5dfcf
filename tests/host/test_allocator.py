"""The allocator of GPU memory is chosen before torch starts, and what it needs is said before it hurts."""

import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import trainer.train.allocator
from trainer.config.model import Allocator, MemoryConfig
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import override, read_recipe
from trainer.config.section import validated
from trainer.errors import BadInputError
from trainer.host.allocator import allocator_variables, check_allocator
from trainer.observe.memory import after_evaluation, memory_metrics, used_memory
from trainer.train.allocator import set_up_allocator, use_managed_memory
from trainer.train.build import set_determinism

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("choice", "environ", "version", "wanted"),
    [
        ("native", {}, "2.9.1+cu128", {}),
        ("managed", {}, "2.9.1+cu128", {}),
        ("native", {NEW: "backend:cudaMallocAsync"}, "2.9.1", {}),
        ("expandable", {}, "2.9.1+cu128", {NEW: "expandable_segments:True"}),
        ("expandable", {}, "2.14.1+cu130", {NEW: "expandable_segments:True"}),
        ("expandable", {}, "2.5.1", {OLD: "expandable_segments:True"}),
        ("async", {}, "2.8.0", {OLD: "backend:cudaMallocAsync"}),
        (
            "expandable",
            {NEW: "max_split_size_mb:128"},
            "2.9.1",
            {NEW: "max_split_size_mb:128,expandable_segments:True"},
        ),
        # The user's variable, under its older name: torch would take only one of the two.
        (
            "async",
            {OLD: "roundup_power2_divisions:[256:1,512:2]"},
            "2.9.1",
            {OLD: "roundup_power2_divisions:[256:1,512:2],backend:cudaMallocAsync"},
        ),
        ("async", {NEW: "backend:cudaMallocAsync"}, "2.9.1", {NEW: "backend:cudaMallocAsync"}),
    ],
)
def test_what_the_ranks_get(
    choice: Allocator, environ: dict[str, str], version: str, wanted: dict[str, str]
) -> None:
    assert allocator_variables(choice, environ, version) == wanted


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("expandable", "expandable_segments:False"),
        ("expandable", "backend:cudaMallocAsync"),
        ("async", "backend:native,max_split_size_mb:64"),
    ],
)
def test_the_users_own_options_are_not_overruled(choice: Allocator, text: str) -> None:
    with pytest.raises(BadInputError, match=f"memory.allocator={choice}: {NEW}={text} says otherwise; unset"):
        allocator_variables(choice, {NEW: text}, "2.9.1")


@pytest.mark.parametrize(
    ("choice", "environ", "driver", "message"),
    [
        (
            "async",
            {NEW: "backend:cudaMallocAsync"},
            "450.80.02",
            "needs driver 470.42 or newer, and here is 450",
        ),
        ("managed", {}, "470.82.01", "needs driver 525.60 or newer"),
        ("managed", {}, "570.26", "needs RMM, which isn't installed: pip install rmm-cu12"),
        ("async", {}, "570.26", "export PYTORCH_ALLOC_CONF=backend:cudaMallocAsync before torchrun"),
        ("expandable", {NEW: "backend:native"}, None, "expandable_segments:True before torchrun"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_allocated(
    choice: Allocator, environ: dict[str, str], driver: str | None, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        check_allocator(choice, environ, driver)


def test_enough_is_enough() -> None:
    check_allocator("native", {}, "450.80.02")
    check_allocator("async", {NEW: "backend:cudaMallocAsync"}, "470.42.01")
    check_allocator("async", {OLD: "backend:cudaMallocAsync"}, None)  # a driver that NVML doesn't tell
    check_allocator("expandable", {NEW: "expandable_segments:True"}, "450.80.02")


@pytest.fixture
def rmm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for RMM that notes how it is set up."""
    seen: dict[str, Any] = {}
    library, allocators, for_torch = (types.ModuleType(name) for name in ("rmm", "rmm.allocators", "torch"))
    library.reinitialize = lambda **options: seen.update(options)  # type: ignore[attr-defined]
    for_torch.rmm_torch_allocator = "rmm's"  # type: ignore[attr-defined]
    library.__spec__ = types.SimpleNamespace(name="rmm")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "rmm", library)
    monkeypatch.setitem(sys.modules, "rmm.allocators", allocators)
    monkeypatch.setitem(sys.modules, "rmm.allocators.torch", for_torch)
    monkeypatch.setattr(
        torch.cuda.memory, "change_current_allocator", lambda allocator: seen.update(allocator=allocator)
    )
    return seen


def test_managed_memory_may_be_larger_than_the_card_but_not_than_the_host(rmm: dict[str, Any]) -> None:
    use_managed_memory(1, gpu_bytes=8 << 30, host_bytes=10 << 30)
    assert rmm == {
        "pool_allocator": True,
        "managed_memory": True,
        "initial_pool_size": 1 << 30,
        "maximum_pool_size": (8 << 30) + (8 << 30),
        "devices": 1,
        "allocator": "rmm's",
    }


def test_each_rank_sets_up_its_own_gpu(rmm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.train.allocator, "driver_version", lambda: "570.26")
    monkeypatch.setattr(trainer.train.allocator, "gpu_bytes", lambda _, gpu: gpu << 30)
    set_up_allocator("managed", {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    assert rmm["devices"] == 3
    assert rmm["maximum_pool_size"] > 3 << 30
    rmm.clear()
    set_up_allocator("native", {})
    assert not rmm


def test_an_allocator_that_tells_nothing_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "pluggable")
    for name in (
        "memory_stats_as_nested_dict",
        "reset_peak_memory_stats",
        "memory_allocated",
        "memory_reserved",
    ):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    gpu = torch.device("cuda", 0)
    assert memory_metrics(gpu) == {}
    assert used_memory(gpu) == 0
    assert set(after_evaluation(MemoryConfig(empty_cache="after_eval"), gpu)) == {"memory/freed_seconds"}


def recipe(settings: Mapping[str, str]) -> Recipe:
    words = [f"{key}={value}" for key, value in settings.items()]
    return validated(Recipe, override(read_recipe("digits"), words), "digits")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory.allocator": "manged"}, "did you mean 'managed'"),
        ({"memory.allocator": "async", "memory.history": "true"}, "memory.history is PyTorch's own"),
        ({"memory.allocator": "managed", "compile.mode": "reduce-overhead"}, "can't serve CUDA graphs"),
    ],
)
def test_what_does_not_go_together(settings: dict[str, str], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        recipe(settings)


def test_cudnn_is_not_timed_with_memory_that_nobody_can_count() -> None:
    before = torch.backends.cudnn.benchmark
    try:
        set_determinism(recipe({"memory.allocator": "managed"}))
        assert not torch.backends.cudnn.benchmark
        set_determinism(recipe({"memory.allocator": "expandable"}))
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before
