"""`trainer export RUN`: writes a run's model in another format.

- `export`: writes it, whole or not at all, with a description of its inputs
- `check`: compares the file's outputs with the model's; `reload` is the fresh process that computes them
"""

import argparse
from pathlib import Path
from typing import Any

from trainer.host.latest import run_path
from trainer.runs.flags import add_settings, add_task


def add_parser(commands: Any) -> None:
    """Adds `export` to the commands."""
    export = commands.add_parser(
        "export",
        help="Export a model for use elsewhere. Exit code 1: the exported model differs.",
        allow_abbrev=False,
    )
    add = export.add_argument
    add("folder", type=run_path, metavar="RUN", help="run folder (or latest), finished or with a checkpoint")
    add(
        "--to",
        required=True,
        choices=("torch-export", "onnx", "safetensors", "transformers", "peft"),
        help="file format: safetensors holds weights only; transformers (models hf/…) and peft (LoRA) are "
        "folders that these libraries load",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="number format of the weights (default: fp32)",
    )
    add(
        "--with-normalization",
        action="store_true",
        help="take uint8 (n, height, width, channels) and give probabilities (images to classes)",
    )
    add("--out", type=Path, metavar="DIR", help="folder to write (default: RUN/export/FORMAT-DTYPE)")
    add("--force", action="store_true", help="replace an export that is there")
    add_settings(export, "place of the data now, such as data.path")
    add_task(export)
    export.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from trainer.runs.manifest import read_run

    read_run(options.folder)  # what is no run is said before torch is imported
    from trainer.commands.export.export import export

    return export(options)
