"""Promise, without a GPU: what would stop the host there, be refused by NCCL or pile up shows on the CPU."""

import os
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.refusals import named
from tests.helpers.toys import build_alone
from trainer.config.recipe import Recipe
from trainer.config.recipe_file import load_recipe
from trainer.data import device as crossing
from trainer.distributed.parallel import World
from trainer.host.allocator import CUBLAS_WORKSPACE
from trainer.observe.flops import waits
from trainer.train.components import run as build
from trainer.train.components.checkpoint_choice import resume_notes
from trainer.train.components.model import prepare_model
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate_run
from trainer.train.start import local_ranks
from trainer.train.step import take_metrics, train_step

GPU = torch.device("cuda", 0)
# Besides what `waits` knows: these ask the device for a size, as does an index by a mask.
SIZED = {"aten::masked_select", "aten::_unique2", "aten::bincount", "aten::repeat_interleave"}
INDEXED = {"aten::index", "aten::index_put", "aten::index_put_"}
# What may wait, each with its reason.
MAY_WAIT = {
    "evaluate.py evaluate:": "the sums of an evaluation, once at its end",
    "measured.py": "the tables of an evaluation, once at its end",
    "average_precision.py": "rows that lie on the host, at the end",
    "detection.py": "the boxes that are found in an image of an evaluation: how many, only the device knows",
    "language.py summarize:": "rows that lie on the host, at the end",
    "boxes.py": "torchvision's suppression of boxes, for those",
}


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a GPU, by file.

    A number that is put into an element, or a list of them made a tensor, is copied there and waited for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Counter[str]()
        self._held: list[torch.Tensor] = []  # so that no id is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        out = func(*args, **kwargs)
        masked = name in INDEXED and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name == "aten::lift_fresh":
            self._held.append(out)
        fresh = name == "aten::copy_" and any(args[1] is one for one in self._held)
        if fresh or masked or name in SIZED or waits(name, args, kwargs, torch.device("cpu")):
            self.found[f"{name} at {self._where()}"] += 1
        return out

    @staticmethod
    def _where() -> str:
        frames = [f for f in traceback.extract_stack() if f"{os.sep}torch{os.sep}" not in f.filename]
        return f"{Path(frames[-3].filename).name} {frames[-3].name}:{frames[-3].lineno}"


GPT = ["language.layers=1", "language.width=32", "language.heads=2", "language.sequence_length=64"]
GPT += ["data.micro_batch_size=4", "data.global_batch_size=8", "data.eval_batch_size=256"]
CASES = {
    "clipped": ["digits", "data.micro_batch_size=16", "data.global_batch_size=32", "optim.max_grad_norm=1"],
    "muon": ["digits", "precision.mode=fp16", "optim.name=muon", "ema.decay=0.9"],
    "debug": ["digits", "precision.mode=bf16", "anomaly.nonfinite=skip", "precision.debug=true"],
    "mixed": ["digits", "regularization.mixup=0.2", "regularization.cutmix=1.0"],
    "tree": ["digits", "parallel.reduction=tree", "data.last_batch=weighted", "memory.checkpointing=blocks"],
    "stream": ["gpt-stdlib", *GPT],
    "packed": ["gpt-stdlib", *GPT, "language.text=packed"],
    "boxes": ["digits-detection"],
    "sound": ["dtmf"],
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_in_a_step_a_row_or_an_evaluation(case: str) -> None:
    name, *settings = CASES[case]
    common = ["parallel.threads=1", "compile.mode=none", "max_steps=8", "data.limit=64"]
    common += ["data.eval_batch_size=4"]  # so that there are more micro-batches than metrics
    recipe = load_recipe(name, [*common, *settings], None)
    run = build_alone(recipe, make_task(recipe))
    batches = run.loader(run.share.batches())
    train_step(run, batches, 0)
    with Waits() as seen:
        train_step(run, batches, 1)
        take_metrics(run)
    assert not seen.found
    with Waits() as seen:
        evaluate_run(run)
    once = {place: n for place, n in seen.found.items() if not any(file in place for file in MAY_WAIT)}
    assert not once
    sums = [n for place, n in seen.found.items() if "evaluate.py" in place]
    assert max(sums, default=0) <= 1 + len(run.state.metrics), seen.found  # not once a micro-batch
    run.close()


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that were asked of NCCL's group, which has nothing for tensors on the CPU."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    for name in dir(dist):
        if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter", "barr")):
            monkeypatch.setattr(dist, name, lambda *_, called=name, **__: calls.append(called))
    return calls


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_nothing_is_measured_on_the_host_for_a_gpu_nor_together(
    strategy: str, collectives: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With DDP the model would go to the GPU: to none here.
    device = GPU if strategy == "fsdp" else torch.device("meta")
    sections = ["parallel.sync_batchnorm=true", "memory.checkpointing=blocks", "max_steps=3"]
    recipe = load_recipe("digits", [f"parallel.strategy={strategy}", *sections], None)
    task, seen = make_task(recipe), set[str]()
    make = task.model

    def watched() -> torch.nn.Module:
        model = make()
        model.register_forward_pre_hook(lambda _, inputs: seen.add(f"{type(inputs[0])} {inputs[0].device}"))
        return model

    monkeypatch.setattr(task, "model", watched)
    group: Any = object()
    prepared = prepare_model(recipe, task, World(0, 2, 0, device, group, None, 2))
    assert not collectives
    assert seen and all("FakeTensor" in one or "meta" in one for one in seen)
    assert any(note.startswith("activation checkpointing") for note in prepared.notes)
    assert all(type(t) in (torch.nn.Parameter, torch.Tensor) for t in prepared.model.state_dict().values())
    task.loss(make(), next(iter(build_alone(recipe, task).loader(range(1)))))  # keeps no shapes of tensors


def test_all_passes_over_the_data_share_a_side_stream() -> None:
    # What is freed on a stream serves that stream alone: each further one keeps memory for nothing.
    crossing._side_stream.cache_clear()
    slots = [(torch.zeros(4, dtype=torch.uint8), 1)] * 3
    fake = {name: mock.MagicMock() for name in ("Stream", "Event", "stream", "current_stream")}
    with mock.patch.multiple(torch.cuda, **fake), mock.patch.object(torch.Tensor, "record_stream"):
        for _ in range(3):
            assert len(list(crossing.copied_ahead(iter(slots), torch.device("cpu"), staged=False))) == 3
    crossing._side_stream.cache_clear()
    assert fake["Stream"].call_count == 1


def deterministic(on: bool) -> Recipe:
    return load_recipe("digits", [f"deterministic={str(on).lower()}", "max_steps=3"], None)


def test_the_ranks_have_what_cublas_needs_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    name, value = CUBLAS_WORKSPACE
    monkeypatch.setattr(local_ranks, "count_gpus", lambda _: 1)
    monkeypatch.setattr(local_ranks, "bus_ids", lambda *_: [])
    monkeypatch.delenv(name, raising=False)
    assert local_ranks.plan_local_ranks(deterministic(True), None, None).environment[name] == value
    assert name not in local_ranks.plan_local_ranks(deterministic(False), None, None).environment
    monkeypatch.setenv(name, ":16:8")
    assert local_ranks.plan_local_ranks(deterministic(True), None, None).environment[name] == ":16:8"


@pytest.mark.compat
def test_attention_does_without_cudnns_kernels_whose_gradients_may_be_nan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # is put back
    torch.backends.cuda.enable_cudnn_sdp(True)
    build.set_determinism(deterministic(False), GPU)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("device", "settings", "told"),
    [
        ("cpu", {}, "bits"),
        ("cuda", {}, "deterministic=true"),
        ("cuda", {"deterministic": True}, "bits"),
        ("cuda", {"parallel": {"reduction": "all_reduce"}}, "sums"),
    ],
)
def test_the_same_bits_are_told_only_where_kernels_repeat_theirs(
    device: str, settings: dict[str, Any], told: str
) -> None:
    stored: Any = mock.Mock(config={"parallel": {"reduction": "tree"}, **settings}, world_size=4, steps=9)
    stored.status, stored.extended = "stopped", False
    notes = resume_notes(stored, [], 3, World(0, 1, 0, torch.device(device), None), 9)
    assert named(notes[-1], told)
