"""Promise, on a GPU: packed text by FlexAttention's kernel is packed text by a mask, without the mask."""

from typing import Any

import pytest
import torch

from tests.helpers.toys import make_recipe
from trainer.config.sizes import MIB
from trainer.config.tasks import GPTConfig
from trainer.data.loader import Source, make_loader
from trainer.distributed.parallel import World
from trainer.models.compiling import missing_for_compiling
from trainer.models.gpt import GPT
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.step import train_step

GPU = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(missing_for_compiling(GPU) is not None, reason=f"{missing_for_compiling(GPU)}"),
]

SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "width": 256, "sequence_length": 1024}


def step_of(by_blocks: bool, segment: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of the first matrix."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES), 100).to(GPU, dtype)
    model.by_blocks = by_blocks
    tokens = torch.randint(100, segment.shape, device=GPU)
    logits = model(tokens, segment)
    logits.float().logsumexp(-1).sum().backward()
    gradient = model.get_parameter("blocks.0.attention.qkv.weight").grad
    assert gradient is not None
    return logits.detach().double(), gradient.double()


def a_segment(rows: int, length: int) -> torch.Tensor:
    begins = torch.rand(rows, length, generator=torch.Generator().manual_seed(1)) < 0.01
    return begins.cumsum(1).to(GPU, torch.int16)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)])
def test_the_kernel_computes_what_the_mask_does(dtype: torch.dtype, error: float) -> None:
    segment = a_segment(3, 1024)
    for found, wanted in zip(step_of(True, segment, dtype), step_of(False, segment, dtype), strict=True):
        assert float((found - wanted).norm()) < error * float(wanted.norm())


def test_a_step_has_the_same_bits_twice() -> None:
    segment = a_segment(3, 1024)
    first, second = (step_of(True, segment, torch.bfloat16) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_nothing_of_length_times_length_is_held() -> None:
    """8,192 places: a mask of all pairs takes 64 MiB for each row, and in bfloat16 twice that."""
    segment = a_segment(2, 8192)
    step_of(True, segment, torch.bfloat16)
    peaks = []
    for by_blocks in (True, False):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step_of(by_blocks, segment, torch.bfloat16)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] < peaks[1] - 2 * 64 * MIB


@pytest.mark.parametrize("scope", [None, "model", "blocks"])
def test_a_run_takes_it_and_never_waits(scope: str | None) -> None:
    recipe = make_recipe(
        task="language",
        language={**SIZES, "text": "packed"},
        data={"name": "synthetic", "samples": 64, "micro_batch_size": 4, "global_batch_size": 8},
        memory={"checkpointing": "blocks"},
        precision={"mode": "bf16"},
        **({"compile": {"mode": "default", "scope": scope}} if scope else {}),
    )
    run = build(recipe, make_task(recipe), World(0, 1, 0, GPU, None), workers=0)
    assert "packed text: attends by blocks (FlexAttention), compiled and tried at the start" in run.notes
    source = Source(run.task.train_data, run.share, 0)
    batches = make_loader(source, GPU, recipe.data, 0)(run.share.batches())
    try:
        for step in range(6):
            train_step(run, batches, step)
            if step == 2:
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 4 < float(run.state.loss) / 6 < 7
