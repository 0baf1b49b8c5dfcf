"""Imports that a run makes late, made before forks so that none of them imports again."""

import importlib

import torch

_LATE = (
    *("rich.live", "rich.progress", "rich.table", "tensorboard.compat.proto.event_pb2"),
    *("tensorboard.plugins.text.metadata", "tensorboard.summary.writer.record_writer"),
    *("trainer.data.formats.decode", "trainer.runs.report.page"),
)


def import_optimizers() -> None:
    """torch imports half of itself when the first optimizer is made."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def import_late() -> None:
    import_optimizers()
    for name in _LATE:  # half a second for TensorBoard, which looks for boto3
        importlib.import_module(name)
    # Each run writes a report at its end: compiling its templates takes longer than the run of a small model.
    from trainer.runs.report.page import templates

    for name in templates.list_templates(["html"]):
        templates.get_template(name)
