"""The allocator of GPU memory is chosen before torch starts, and what it needs is said before it hurts."""

from typing import cast

import pytest

from trainer.config.model import Allocator
from trainer.errors import BadInputError
from trainer.host.allocator import allocator_variables, check_allocator

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
EXPANDABLE, ASYNC = "expandable_segments:True", "backend:cudaMallocAsync"


@pytest.mark.parametrize(
    ("choice", "environ", "version", "wanted"),
    [
        ("native", {}, "2.9.1+cu128", {}),
        ("native", {NEW: ASYNC}, "2.9.1", {}),
        ("expandable", {}, "2.14.1+cu130", {NEW: EXPANDABLE}),
        ("expandable", {}, "2.5.1", {OLD: EXPANDABLE}),
        ("async", {}, "2.8.0", {OLD: ASYNC}),
        ("expandable", {NEW: "max_split_size_mb:128"}, "2.9.1", {NEW: f"max_split_size_mb:128,{EXPANDABLE}"}),
        # The user's variable, under its older name: torch would take only one of the two.
        ("async", {OLD: "roundup:[256:1,512:2]"}, "2.9.1", {OLD: f"roundup:[256:1,512:2],{ASYNC}"}),
        ("async", {NEW: ASYNC}, "2.9.1", {NEW: ASYNC}),
    ],
)
def test_what_the_ranks_get(
    choice: Allocator, environ: dict[str, str], version: str, wanted: dict[str, str]
) -> None:
    assert allocator_variables(choice, environ, version) == wanted


def test_the_users_own_options_are_not_overruled() -> None:
    for choice, text in (("expandable", "expandable_segments:False"), ("async", "backend:native")):
        with pytest.raises(
            BadInputError, match=f"memory.allocator={choice}: {NEW}={text} says otherwise; unset"
        ):
            allocator_variables(cast(Allocator, choice), {NEW: text}, "2.9.1")


@pytest.mark.parametrize(
    ("choice", "environ", "driver", "message"),
    [
        ("async", {NEW: ASYNC}, "450.80.02", "needs driver 470.42 or newer, and here is 450"),
        ("async", {}, "570.26", f"export PYTORCH_ALLOC_CONF={ASYNC} before torchrun"),
        ("expandable", {NEW: "backend:native"}, None, f"{EXPANDABLE} before torchrun"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_allocated(
    choice: Allocator, environ: dict[str, str], driver: str | None, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        check_allocator(choice, environ, lambda: driver)
