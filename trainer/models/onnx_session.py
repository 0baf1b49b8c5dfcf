"""Inference by ONNX Runtime, without torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

_Outputs = list[Any]


def onnx_session(file: Path, threads: int = 0) -> Callable[..., _Outputs]:
    """Opens an ONNX file in ONNX Runtime on the CPU; returns a function of arrays that returns arrays.

    Args:
        file: ONNX file.
        threads: Threads of one operation; 0: one per core.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*values: Any) -> _Outputs:
        outputs: _Outputs = session.run(None, dict(zip(names, values, strict=True)))
        return outputs

    return run
