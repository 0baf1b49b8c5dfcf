"""`make doctor` looks at the machine, and from a container of the image where there is one."""

from typing import Any

import pytest

from tests.helpers.engine_box import LISTED, Machine


def doctor(machine: Machine, *words: str, code: int, found: int = 1) -> tuple[str, str]:
    trainer = machine.root / ".venv/bin/trainer"
    trainer.write_text(f'#!/bin/sh\necho "in .venv:" "$@"\nexit {found}\n')
    return machine.run("doctor", *words, code=code)


def test_the_doctor_looks_at_the_machine_and_from_a_container(machine: Machine) -> None:
    machine.engine()
    out, _ = doctor(machine, "--", "digits", "--json", code=1)
    assert "in .venv: doctor digits --json\n" in out
    assert "runtime: from a container of trainer:torch2.9-cu128-train\n" in out
    (ran,) = [words for words in machine.asked() if words[0] == "run"]
    assert ran[-5:] == ["trainer:torch2.9-cu128-train", "trainer", "doctor", "digits", "--json"]
    assert "--gpus" not in ran


def test_the_doctor_in_a_container_sees_the_gpus_that_it_can(machine: Machine) -> None:
    machine.engine(run_=(0, LISTED, ""), run___rm___pull_never=(0, LISTED, ""))
    machine.gpus()
    doctor(machine, code=1)
    assert machine.asked()[-1][-5:-3] == ["--gpus", "all"]


@pytest.mark.parametrize(
    ("there", "said"), [({"version": (1, "", "Cannot connect to the Docker daemon")}, "none is running")]
)
def test_the_doctor_without_a_container(machine: Machine, there: dict[str, Any], said: str) -> None:
    machine.engine(**there)
    out, _ = doctor(machine, code=1)
    assert "runtime: not looked at from a container: " in out
    assert said in out
