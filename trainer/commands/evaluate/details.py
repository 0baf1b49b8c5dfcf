"""Metrics beyond those of training: a wrapper around a task that computes and keeps them."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from trainer.data.batch import Batch
from trainer.data.formats.records import LABEL
from trainer.data.sources import IMAGE
from trainer.tasks import Task
from trainer.tasks.audio import Audio
from trainer.tasks.average_precision import coco_figures
from trainer.tasks.classification import Classification
from trainer.tasks.coco_results import results_of_rows
from trainer.tasks.detection import Detection
from trainer.tasks.sums import classified
from trainer.train.model_of_run import read_samples

_MISTAKES = 12
_PICTURE = 96  # pixels of a side


class WithDetails:
    """A task that is measured as usual, with further metrics of the same outputs.

    Attributes:
        details: Set by the evaluation, for JSON: `confusion` lists [true class, predicted class, samples] for
            cells that aren't empty (a whole matrix of 10,000 classes would have 100 million); `mistakes`
            lists the samples that are wrong with the highest probability.
        classes: Names of the classes; empty where there are none.
    """

    def __init__(self, task: Task) -> None:
        """Wraps a task."""
        self.task = task
        self.details: dict[str, Any] = {}
        self.classes: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Measures as the wrapped task does."""
        return self.task.measure(model, batch)


class OfClasses(WithDetails):
    """Classification and audio: the confusion matrix."""

    task: Classification | Audio

    def __init__(self, task: Classification | Audio) -> None:
        """Wraps a task."""
        super().__init__(task)
        self.classes = tuple(task.describe()["classes"])

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Adds each sample's true class, predicted class and its probability to the task's metrics."""
        logits = model(*self.task.inputs(batch))
        sure, predicted = logits.float().softmax(1).max(1)
        rows = {"label": batch.fields[LABEL].to(torch.int64), "predicted": predicted, "sure": sure}
        return {**classified(logits, batch.fields[LABEL], batch), **rows}

    def summarize(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Keeps the cells of the confusion matrix that aren't empty, and the surest mistakes."""
        pairs, samples = torch.stack([rows["label"], rows["predicted"]]).unique(dim=1, return_counts=True)
        self.details["confusion"] = torch.cat([pairs.T, samples[:, None]], 1).tolist()
        wrong = (rows["label"] != rows["predicted"]) & rows["sure"].isfinite()  # not of a model that diverged
        wrong = wrong.nonzero().flatten()
        wrong = wrong[rows["sure"][wrong].argsort(descending=True, stable=True)][:_MISTAKES]
        names = ("label", "predicted", "sure")
        self.details["mistakes"] = [
            {"sample": int(sample), **{name: rows[name][sample].item() for name in names}} for sample in wrong
        ]
        return {}


class OfBoxes(WithDetails):
    """Detection: COCO's twelve figures beside the task's own."""

    task: Detection

    def __init__(self, task: Detection, results: bool = False) -> None:
        """Wraps a task; with `results` the entries of COCO's results file are kept, too."""
        super().__init__(task)
        self._results = results

    def summarize(self, rows: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Returns the task's metrics, and keeps COCO's twelve figures."""
        metrics = self.task.summarize(rows)
        arrays = {name: np.asarray(tensor) for name, tensor in rows.items()}
        arrays["true_count"] = arrays["true_count"][:, 0]
        self.details["coco"] = coco_figures(arrays, len(self.task.classes))
        if self._results:
            self.details["results"] = results_of_rows(self.task, arrays)
        return metrics


def with_details(task: Task, results: bool = False) -> WithDetails:
    """Wraps a task; a custom one gets no further metrics.

    Args:
        task: The task.
        results: True to keep the entries of COCO's results file.
    """
    if isinstance(task, Classification) and task.several:
        return WithDetails(task)
    if isinstance(task, (Classification, Audio)):
        return OfClasses(task)
    return OfBoxes(task, results) if isinstance(task, Detection) else WithDetails(task)


def add_pictures(mistakes: Sequence[dict[str, Any]], task: Task) -> None:
    """Adds the image of each mistake as "png", base64, at most 96 pixels a side.

    Args:
        mistakes: As in `WithDetails.details`.
        task: The task, with its evaluation data; nothing is added if its samples aren't images.
    """
    data = task.evaluation_data
    if not mistakes or IMAGE not in data.fields:
        return
    images = read_samples(data, np.array([one["sample"] for one in mistakes])).fields[IMAGE].numpy()
    for mistake, image in zip(mistakes, images, strict=True):
        picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image[:, :, :3])
        picture.thumbnail((_PICTURE, _PICTURE))
        png = BytesIO()
        picture.save(png, "PNG")
        mistake["png"] = b64encode(png.getvalue()).decode()
