"""Computes the outputs of an exported file in a process that knows nothing of the run.

    python -m trainer.commands.export.reload FILE INPUTS OUTPUTS [RUN [KEY=VALUE …]]

INPUTS and OUTPUTS are safetensors files, with the tensors of each batch named by `slot`. RUN is the run
folder, for weights alone: they need the model that they belong to; the settings say where its data lies.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# torch.export.load reads its example inputs by torch.load, and asks for any pickle; with this torch reads
# tensors and nothing else.
ONLY_WEIGHTS = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}

_Outputs = list[Any]


def slot(batch: int, place: int) -> str:
    """Returns the name of an input or output of a batch."""
    return f"{batch:04d}.{place:04d}"


def main(arguments: Sequence[str]) -> int:
    """Computes the outputs of every batch."""
    file, inputs, outputs = (Path(argument) for argument in arguments[:3])
    if file.suffix == ".onnx":
        _by_onnxruntime(file, inputs, outputs)
    else:
        os.environ.update(ONLY_WEIGHTS)
        _by_torch(file, inputs, outputs, arguments[3:])
    return 0


def _by_onnxruntime(file: Path, inputs: Path, outputs: Path) -> None:
    """Computes by onnxruntime, without torch, as users of the file do."""
    from safetensors.numpy import load_file, save_file

    from trainer.models.onnx_session import onnx_session

    run = onnx_session(file)
    save_file(_each(load_file(inputs), run), outputs)


def _by_torch(file: Path, inputs: Path, outputs: Path, run: Sequence[str]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from trainer.models.export_formats import leaves

    model = load_model(file, run)

    def call(*values: Any) -> _Outputs:
        with torch.no_grad():
            return [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves(model(*values))]

    save_file(_each(load_file(inputs), call), outputs)


def load_model(file: Path, run: Sequence[str] = ()) -> Callable[..., Any]:
    """Loads a file of one of torch's formats as a callable.

    Args:
        file: The file.
        run: The run folder and settings for `open_run`; needed for weights alone.
    """
    import torch

    if file.suffix == ".pt2":
        model: Callable[..., Any] = torch.export.load(file).module()
        return model
    if not run:
        return _by_library(file.parent)
    from safetensors.torch import load_file

    from trainer.train.model_of_run import open_run

    model_of_run = open_run(Path(run[0]), run[1:]).model
    model_of_run.load_state_dict(load_file(file))  # computes in its own precision, whatever the file's is
    return model_of_run


def _by_library(folder: Path) -> Callable[..., Any]:
    """A folder as transformers loads it, or peft; without peft what LoRA learned is added here.

    It computes in float32 whatever the weights are in, so that the file is compared and not the arithmetic.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    from trainer.host import strict_json
    from trainer.models.gpt import documents

    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    opens = transformers.AutoModelForCausalLM.from_pretrained
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        about = strict_json.parse(adapter.read_bytes())
        base = opens(about["base_model_name_or_path"], revision=about["revision"] or "main", dtype="float32")
        model = _with_adapter(base, folder, about)
    else:
        model = opens(folder, dtype="float32")

    def call(tokens: Any, segment: Any = None) -> Any:
        places = None
        if segment is not None:  # by positions that begin anew the library knows documents side by side
            number = documents(segment)
            first = (number[:, None, :] < number[:, :, None]).sum(2)
            places = torch.arange(tokens.shape[1]) - first
        return model(input_ids=tokens, position_ids=places, use_cache=False).logits.float()

    return call


def _with_adapter(model: Any, folder: Path, about: Any) -> Any:
    if importlib.util.find_spec("peft") is not None:
        from peft import PeftModel  # type: ignore[import-not-found, unused-ignore]

        return PeftModel.from_pretrained(model, folder).eval()
    from safetensors.torch import load_file

    given, state = load_file(folder / "adapter_model.safetensors"), model.state_dict()
    for name in about["target_modules"]:
        a, b = (given[f"base_model.model.{name}.lora_{which}.weight"].float() for which in "AB")
        state[f"{name}.weight"] += about["lora_alpha"] / about["r"] * (b @ a)
    for name, tensor in given.items():
        if (own := name.removeprefix("base_model.model.")) in state:  # trained as a whole
            state[own].copy_(tensor)
    return model


def _each(tensors: dict[str, Any], call: Callable[..., _Outputs]) -> dict[str, Any]:
    batches = dict[str, list[Any]]()
    for name in sorted(tensors):
        batches.setdefault(name.partition(".")[0], []).append(tensors[name])
    return {
        slot(int(batch), place): output
        for batch, values in batches.items()
        for place, output in enumerate(call(*values))
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
