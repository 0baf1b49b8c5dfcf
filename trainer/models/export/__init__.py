"""A trained model in other formats, and what is done to it before: for `trainer export` and what times it.

- `fold`: BatchNorm folded into the layer before it
- `formats`: writes torch.export's archive, ONNX, TorchScript
- `interface`: what an exported model takes and gives
- `onnx`: calls an ONNX file, without torch
- `error`: how far its outputs may lie from the model's own, and how far they do
"""
