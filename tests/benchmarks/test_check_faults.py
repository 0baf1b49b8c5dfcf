"""Promise: `trainer check` sees known faults; without one nothing differs."""

import pytest

from benchmarks.__main__ import main
from benchmarks.check_faults.bench import self_test
from benchmarks.check_faults.faults import BY_NAME, FAULTS
from tests.helpers.refusals import named
from trainer.commands.check.variants import VARIANTS

ELSEWHERE = {variant.name for variant in VARIANTS if variant.where != "here"}
KINDS = {fault.seen_by: fault.name for fault in FAULTS if not ELSEWHERE & set(fault.seen_by)}
SOME = ["average-slower", *KINDS.values()]


def test_faults_in_one_process_are_seen() -> None:
    """One or two of each kind; all of them are tried by `make nightly`."""
    found = [*self_test(lambda _: None, SOME)]
    assert [one.fault for one in found if not one.seen] == []
    assert {one.fault for one in found} == {"", *SOME} and len(KINDS) > 7


def test_a_fault_that_is_not_seen_is_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blind = BY_NAME["rate-late"]._replace(seen_by=("order",))
    monkeypatch.setattr("benchmarks.check_faults.bench.FAULTS", (blind,))
    assert main(["faults"]) == 1
    assert named(capsys.readouterr().out, "rate-late MISSED 1 of 2")


@pytest.mark.slow
def test_all_faults_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faults"]) == 0, capsys.readouterr().out
