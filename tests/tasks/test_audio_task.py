"""Promise: recordings become log-mel features on the device, masked in training alone; a folder is checked
before training; the embedded recipe learns, and goes on with the same bits.
"""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.helpers.refusals import refused
from tests.helpers.toys import make_recipe
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.formats.records import LABEL
from trainer.tasks.audio import Audio
from trainer.train.components.task import make_task


def recipe(**sections: Any) -> Recipe:
    windows = {"seconds": 0.128, "sample_rate": 8000, "mels": 32, "window": 0.04, "hop": 0.008}
    audio = {**windows, "lowest": 500, "highest": 1800, **sections.pop("audio", {})}
    data = {"global_batch_size": 32, "micro_batch_size": 16, **sections.pop("data", {})}
    return make_recipe(task="audio", audio=audio, data=data, model={"width": 8, "norm": "group"}, **sections)


def audio_task(**sections: Any) -> Audio:
    task = make_task(recipe(data={"name": "synthetic", "samples": 64, "classes": 4}, **sections))
    assert isinstance(task, Audio)
    return task


def batch_of(task: Audio, count: int, weight: torch.Tensor | None = None, first: int = 0) -> Batch:
    arrays = task.train_data.arrays
    assert arrays is not None
    fields = {name: torch.from_numpy(array[first : first + count].copy()) for name, array in arrays.items()}
    return Batch(fields, weight, None, count)


@pytest.mark.compat
@pytest.mark.parametrize(("rate", "highest"), [(8000, 1800.0), (44100, None)])
def test_features_and_masks_have_the_bits_of_torchaudio(rate: int, highest: float | None) -> None:
    transforms = pytest.importorskip("torchaudio.transforms")
    masks = {"time_masks": 2, "time_mask": 5, "frequency_masks": 2, "frequency_mask": 7}
    task = audio_task(audio={"sample_rate": rate, "highest": highest, "lowest": 20, "mels": 24, **masks})
    given = torch.randint(-20000, 20000, (3, task._config.bins * 4), dtype=torch.int16).float() / 32768
    windows = {"win_length": task._config.window_samples, "hop_length": task._hop, "n_mels": 24}
    theirs = transforms.MelSpectrogram(rate, task._config.bins, f_min=20.0, f_max=highest, **windows)(given)
    assert torch.equal(task._mel(given), theirs)
    torch.manual_seed(5)
    expected = transforms.SpecAugment(2, 5, 2, 7, zero_masking=True)(theirs.unsqueeze(1))
    torch.manual_seed(5)
    masked = task._masked(theirs.unsqueeze(1))
    assert torch.equal(masked, expected)
    assert masked.stride() == expected.stride(), "the model's kernels depend on it"


def test_a_level_changes_nothing_and_silence_is_finite() -> None:
    task = audio_task()
    loud = torch.randint(-20000, 20000, (1, 1024), dtype=torch.int16)
    there = task.features(torch.cat((loud, loud // 4, torch.zeros_like(loud))))
    torch.testing.assert_close(there[0], there[1], atol=0.02, rtol=0)
    assert not there[2].any()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(task.features(loud), there[:1])


def test_masks_are_for_training_only() -> None:
    task = audio_task(audio={"time_masks": 2, "time_mask": 8})
    batch, model = batch_of(task, 8), Mock(return_value=torch.zeros(8, 4))
    task.loss(model, batch)
    task.measure(model, batch)
    (masked,), (seen,) = (call.args for call in model.call_args_list)
    assert torch.equal(seen, task.inputs(batch)[0]) and bool((masked != seen).any())


def write(path: Path, rate: int = 8000) -> None:
    soundfile = pytest.importorskip("soundfile")
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.arange(999).astype(np.int16), rate)


def folder(root: Path, **audio: Any) -> Recipe:
    data = {"name": "folder", "path": str(root), "micro_batch_size": 2, "global_batch_size": 2}
    return recipe(data=data, audio=audio)


def test_the_lists_of_speech_commands_split_its_folder(tmp_path: Path) -> None:
    """Recordings of the other list are neither trained on nor measured, nor is the noise."""
    for name in ("yes/0", "yes/1", "yes/2", "no/0", "no/1", "_background_noise_/pink"):
        write(tmp_path / f"{name}.wav")
    (tmp_path / "validation_list.txt").write_text("no/1.wav\nyes/0.wav\n")
    (tmp_path / "testing_list.txt").write_text("yes/2.wav\n")
    task: Any = make_task(folder(tmp_path))
    assert task.audio.classes == ("no", "yes")
    assert [task.train_data.records.file_name(n) for n in range(2)] == [b"no/0.wav", b"yes/1.wav"]
    out = {name: np.zeros((2, *f.shape), f.dtype) for name, f in task.evaluation_data.fields.items()}
    task.evaluation_data.read(np.arange(2), None, out)
    assert len(task.evaluation_data) == 2 and out[LABEL].tolist() == [0, 1]
    assert [each.count for each in task.train_data.left_out] == [1, 1]
    testing: Any = make_task(folder(tmp_path, part="testing"))
    assert len(testing.evaluation_data) == 1
    (tmp_path / "validation_list.txt").write_text("no/1.wav\nno/77.wav\n")
    with refused("validation_list.txt 2 no/77.wav"):
        make_task(folder(tmp_path))


def test_a_class_without_recordings_is_named(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write(tmp_path / part / "yes" / "0.wav")
        (tmp_path / part / "empty").mkdir()
    with refused("empty 0"):
        make_task(folder(tmp_path))


@pytest.mark.parametrize(("audio", "names"), [({"highest": 5000}, "highest"), ({"window": 2.0}, "window")])
def test_features_that_cannot_be_are_refused(audio: dict[str, Any], names: str) -> None:
    with refused(names, by=ValueError):
        make_task(recipe(audio=audio))


def test_losses_add_up_over_micro_batches_and_padding_counts_for_nothing() -> None:
    task = audio_task()
    model = task.model().double()
    task.features = lambda audio: Audio.features(task, audio).double()  # type: ignore[method-assign]
    whole = task.loss(model, batch_of(task, 16))
    parts = sum(task.loss(model, batch_of(task, 4, first=first)).item() for first in range(0, 16, 4))
    assert whole.item() == pytest.approx(parts, rel=1e-12)
    weight = torch.tensor([1.0] * 4 + [0.0] * 12)
    padded = task.loss(model, batch_of(task, 16, weight))
    assert padded.item() == pytest.approx(task.loss(model, batch_of(task, 4)).item(), rel=1e-12)
    measured = task.measure(model, batch_of(task, 16, weight))
    assert measured["loss"].item() == pytest.approx(padded.item(), rel=1e-12)
    assert int(measured["accuracy"]) <= 4
