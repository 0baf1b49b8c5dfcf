"""Compares the outputs of an exported file with the trained model's: in a fresh process, on real samples."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from trainer.checkpoint.tensor_file import safetensors_bytes
from trainer.commands.export.reload import ONLY_WEIGHTS, slot
from trainer.errors import writing
from trainer.host.files import write_file
from trainer.models.export_formats import ModelOutputs

# Together 32 samples; a batch of one, and sizes that no example had.
BATCHES = (1, 2, 7, 22)
_SECONDS = 900


class NotTheSame(Exception):  # noqa: N818  (the outcome of a check)
    """Raised where the exported file isn't what was requested; the text says how."""


def in_fresh_process(
    file: Path, batches: Sequence[ModelOutputs], run: Sequence[str] = ()
) -> list[list[torch.Tensor]]:
    """Returns the outputs that a file computes in a process of its own.

    Args:
        file: The exported file.
        batches: The inputs of each batch.
        run: For weights alone, see `trainer.commands.export.reload`.

    Returns:
        The outputs of each batch.

    Raises:
        NotTheSame: If it can't be read or run there.
        BadInputError: If the inputs can't be written to the folder of temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="trainer-export-") as folder:
        inputs, outputs = Path(folder, "inputs.safetensors"), Path(folder, "outputs.safetensors")
        named = {
            slot(batch, place): value
            for batch, values in enumerate(batches)
            for place, value in enumerate(values)
        }
        with writing(str(inputs), "make room, or give another folder by TMPDIR"):
            write_file(inputs, safetensors_bytes(named))
        command = [
            sys.executable,
            "-m",
            "trainer.commands.export.reload",
            str(file),
            str(inputs),
            str(outputs),
            *run,
        ]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **ONLY_WEIGHTS},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise NotTheSame(f"a fresh process hadn't computed it after {_SECONDS} s") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise NotTheSame(f"a fresh process can't read or run it ({last})")
        found = safetensors.torch.load_file(outputs)
    return [
        [found[name] for name in sorted(found) if name.startswith(slot(batch, 0)[:5])]
        for batch in range(len(batches))
    ]
