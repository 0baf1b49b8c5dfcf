"""Ranks prepare in turns: rank 0, the first rank of each host, then the others; who refuses tells all."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from tests.helpers.refusals import refused
from tests.helpers.waiting import SECONDS
from trainer.config.recipe_file import load_recipe
from trainer.distributed.parallel import RankPlace
from trainer.distributed.turns import Turns, heard, say_to_all, wait_for_all
from trainer.errors import BadInputError, LostPeerError, RefusedElsewhereError
from trainer.train.request import PreparedRun, Request, as_json
from trainer.train.start import prepare


def run(*ranks: Callable[[Turns], Any], hosts: int = 1) -> "list[Future[Any]]":
    """Calls a function for each rank, in a thread of its own."""
    store, size = HashStore(), len(ranks)
    here = size // hosts
    places = [RankPlace(rank, size, rank % here, here) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(rank, Turns(place, store)) for rank, place in zip(ranks, places, strict=True)]


def test_a_message_comes_as_it_was_told_and_all_wait_for_all() -> None:
    order = list[str]()

    def first(turns: Turns) -> None:
        time.sleep(0.2)
        order.append("prepared")
        say_to_all(turns, "prepared", {"n": [1, "é"]})
        wait_for_all(turns, SECONDS)

    def other(turns: Turns) -> dict[str, Any]:
        found = heard(turns, "prepared")
        order.append("heard")
        wait_for_all(turns, SECONDS)
        return found

    _, *others = run(first, other, other)
    assert [one.result() for one in others] == [{"n": [1, "é"]}] * 2
    assert order == ["prepared", "heard", "heard"]


def test_who_refuses_tells_all_and_stays_until_they_have_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.distributed import turns as module

    def first(turns: Turns) -> float:
        monkeypatch.setattr(module, "place_of", lambda _: turns.place)
        began = time.monotonic()
        with refused("optim.lr"), module.in_turns(turns.store):
            raise BadInputError("optim.lr=-1: give a number above 0")
        return time.monotonic() - began

    def other(turns: Turns) -> RefusedElsewhereError:
        # As `in_turns` has it, which all ranks of a process would share.
        store = PrefixStore("prepare", turns.store)
        with pytest.raises(RefusedElsewhereError) as error:
            heard(Turns(turns.place, store), "prepared")
        return error.value

    stayed, *others = run(first, other, other)
    told = [(one.result().code, str(one.result())) for one in others]
    assert told == [(2, "optim.lr=-1: give a number above 0")] * 2
    assert stayed.result() < SECONDS


def test_a_rank_that_was_killed_is_named() -> None:
    def first(turns: Turns) -> None:
        with refused("rank 1 2", by=LostPeerError):
            wait_for_all(turns, 0.2)

    run(first, lambda _: None)[0].result()


@pytest.mark.parametrize("shared", [True, False])
def test_a_host_that_has_another_run_folder_is_named(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for launchers on nodes, for torchrun, and for tasks of Slurm."""
    monkeypatch.setattr(prepare, "SHOWN_SECONDS", 0.1)
    recipe = load_recipe("digits", ["parallel.threads=1", "parallel.timeout_s=1"])
    request = Request(recipe, "digits", tmp_path)

    def first(turns: Turns) -> None:
        (tmp_path / ".nodes").write_text("token" if shared else "another")
        answer = as_json(PreparedRun(recipe, "digits", tmp_path))
        say_to_all(turns, "prepared", {"token": "token", "seconds": 0.1, **answer})
        with suppress(LostPeerError):  # where the other refuses
            wait_for_all(turns, SECONDS if shared else 0.3)

    def other(turns: Turns) -> Any:
        with ExitStack() as stack:
            return prepare.prepared_in_turns(request, turns, stack)

    _, found = run(first, other, hosts=2)
    if shared:
        assert found.result()[0].folder == tmp_path
    else:
        with refused("--out", tmp_path):
            found.result()
