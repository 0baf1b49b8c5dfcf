"""What people train: `trainer check` holds on a small task of each kind, as docs/check.md says."""

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.refusals import refused
from tests.helpers.world import Ranks
from trainer.commands.check.check import check
from trainer.commands.check.compare import compare
from trainer.commands.check.plain import StepTensors
from trainer.commands.check.training import open_subject, train_steps
from trainer.commands.check.variants import VARIANTS
from trainer.commands.check.verdicts import train_plainly
from trainer.config.recipe_file import load_recipe
from trainer.distributed.parallel import World

ZOO = Path(__file__).parent / "zoo"
TASKS = sorted(path.name for path in ZOO.glob("*.py") if path.stem not in ("__init__", "shared"))
DOCUMENT = Path(__file__).parents[2] / "docs" / "check.md"
TOLD = dict(re.findall(r"\| `(\w+\.py)` \| ([a-z ]+) \|", DOCUMENT.read_text()))
ON_RANKS = ("byol.py", "experts.py", "surgery.py")  # a teacher, unused parameters, gradients of its own
# An average asks how weights are kept, not for the loss: parametrized, shared, frozen, averaged already.
AVERAGED = (
    *("autoencoder.py", "diffusion.py", "language_tied.py", "lora.py", "mean_teacher.py"),
    *("quantization.py", "spectral_norm.py", "weight_norm.py"),
)


def test_each_has_its_row() -> None:
    assert sorted(TOLD) == TASKS and len(TASKS) >= 30


@pytest.mark.parametrize("name", TASKS)
def test_each_is_trained_as_plain_pytorch_does(name: str) -> None:
    averaged = ["ema"] * (name in AVERAGED)
    report = check(ZOO / name, only=["micro-batches-2", *averaged])
    assert [row.verdict for row in report.rows] == [TOLD[name], *(["equal"] * len(averaged))], str(report)


@pytest.mark.parametrize("name", ON_RANKS)
def test_some_are_so_on_two_ranks(name: str, ranks: Ranks) -> None:
    found, _ = ranks.run(2, _trained, str(ZOO / name))
    subject = open_subject(name, load_recipe(str(ZOO / name), []))
    wanted, nudged = (train_plainly(subject, _DDP, nudged) for nudged in (False, True))
    assert compare(found, wanted, nudged, subject.eps).first is None


_DDP, _FSDP = ({**next(v.edits for v in VARIANTS if v.name == f"ranks-{name}")} for name in ("ddp", "fsdp"))


def _trained(world: World, path: str) -> list[StepTensors]:
    with torch.random.fork_rng(devices=[]):
        return train_steps(open_subject(path, load_recipe(path, [])), _DDP, world).steps


def test_a_loss_that_is_differentiated_twice_is_refused_by_fsdp(ranks: Ranks) -> None:
    ranks.run(2, _refused_by_fsdp, str(ZOO / "wgan_gp.py"))


def _refused_by_fsdp(world: World, path: str) -> None:
    with torch.random.fork_rng(devices=[]), refused("parallel.strategy=ddp torch.autograd.grad"):
        train_steps(open_subject(path, load_recipe(path, [])), _FSDP, world)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_whatever_is_changed(name: str) -> None:
    report = check(ZOO / name, only=[one.name for one in VARIANTS if one.name != "compile"])
    assert report.ok, str(report)
    assert ("plain", "not compared") not in [(row.name, row.verdict) for row in report.rows]
