"""Export of a trained model to other formats, for `trainer export` and `python -m benchmarks inference`.

- `fold`: folds BatchNorm into the layer before it
- `formats`: writes torch.export's archive, ONNX, TorchScript
- `interface`: inputs and outputs of an exported model
- `onnx`: runs an ONNX file, without torch
- `error`: error of its outputs, and the limits
"""
