"""Promise: recordings become log-mel features on the device, masked in training alone; a folder is checked
before training; the embedded recipe learns, and goes on with the same bits.
"""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers import preloaded
from tests.helpers.refusals import refused
from tests.helpers.steps import assert_same_bits, dry_run, train_some
from tests.helpers.toys import make_recipe
from trainer.config.recipe import Recipe
from trainer.data.batch import Batch
from trainer.data.formats.audio import AUDIO
from trainer.data.formats.records import LABEL
from trainer.errors import BadInputError
from trainer.tasks.audio import Audio
from trainer.train.components.task import check_request, make_task


def recipe(**sections: Any) -> Recipe:
    audio = {
        "seconds": 0.128,
        "sample_rate": 8000,
        "mels": 32,
        "window": 0.04,
        "hop": 0.008,
        "lowest": 500,
        "highest": 1800,
        **sections.pop("audio", {}),
    }
    data = {"global_batch_size": 32, "micro_batch_size": 16, **sections.pop("data", {})}
    return make_recipe(task="audio", audio=audio, data=data, model={"width": 8, "norm": "group"}, **sections)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer recordings: they are made anew for each task."""
    monkeypatch.setattr("trainer.data.builtin.dtmf.TRAIN", 512)
    monkeypatch.setattr("trainer.data.builtin.dtmf.TEST", 64)


def audio_task(**sections: Any) -> Audio:
    task = make_task(recipe(data={"name": "synthetic", "samples": 64, "classes": 4}, **sections))
    assert isinstance(task, Audio)
    return task


def batch_of(task: Audio, count: int, weight: torch.Tensor | None = None, first: int = 0) -> Batch:
    arrays = task.train_data.arrays
    assert arrays is not None
    fields = {name: torch.from_numpy(array[first : first + count].copy()) for name, array in arrays.items()}
    return Batch(fields, weight, None, count)


def plain_log_mel(sound: Any, rate: int, window: int, hop: int, mels: int, low: float, high: float) -> Any:
    """Written out from the definitions: centered Hann frames, HTK's mel scale, triangles of height 1."""
    bins = 1 << (window - 1).bit_length()
    padded = np.pad(sound / 32768, bins // 2, mode="reflect")
    hann = np.zeros(bins)
    begin = (bins - window) // 2
    hann[begin : begin + window] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    frames = np.stack([padded[at : at + bins] * hann for at in range(0, len(sound) + 1, hop)])
    power = np.abs(np.fft.rfft(frames, axis=1)) ** 2
    first, last = (2595 * math.log10(1 + edge / 700) for edge in (low, high))
    edges = 700 * (10 ** (np.linspace(first, last, mels + 2) / 2595) - 1)
    hertz = np.linspace(0, rate / 2, bins // 2 + 1)
    rise = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    fall = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    log = np.log(np.clip(np.minimum(rise, fall), 0, None) @ power.T + 1e-6)
    return (log - log.mean()) / log.std()


@pytest.mark.compat
def test_features_are_a_log_mel_spectrogram() -> None:
    task = audio_task()
    batch = batch_of(task, 4)
    (feature,) = task.inputs(batch)
    assert (feature.shape, feature.dtype) == ((4, 1, 32, 17), torch.float32)
    for given, sound in zip(feature[:, 0], batch.fields[AUDIO].numpy(), strict=True):
        expected = plain_log_mel(sound.astype(np.float64), 8000, 320, 64, 32, 500, 1800)
        np.testing.assert_allclose(given.numpy(), expected, atol=2e-3)


@pytest.mark.compat
@pytest.mark.parametrize(
    ("rate", "highest"), [(8000, 1800.0), (16000, None), (11025, None), (44100, 16000.0)]
)
def test_features_and_masks_have_the_bits_of_torchaudio(rate: int, highest: float | None) -> None:
    transforms = pytest.importorskip("torchaudio.transforms")
    masks = {"time_masks": 2, "time_mask": 5, "frequency_masks": 2, "frequency_mask": 7}
    task = audio_task(audio={"sample_rate": rate, "highest": highest, "lowest": 20, "mels": 24, **masks})
    given = torch.randint(-20000, 20000, (3, task._config.bins * 4), dtype=torch.int16).float() / 32768
    theirs = transforms.MelSpectrogram(
        rate,
        n_fft=task._config.bins,
        win_length=task._config.window_samples,
        hop_length=task._hop,
        f_min=20.0,
        f_max=highest,
        n_mels=24,
    )(given)
    assert torch.equal(task._mel(given), theirs)
    torch.manual_seed(5)
    expected = transforms.SpecAugment(2, 5, 2, 7, zero_masking=True)(theirs.unsqueeze(1))
    torch.manual_seed(5)
    masked = task._masked(theirs.unsqueeze(1))
    assert torch.equal(masked, expected)
    assert masked.stride() == expected.stride(), "the model's kernels depend on it"


def test_a_band_between_two_bins_is_told() -> None:
    task = audio_task(audio={"mels": 300})
    assert any("mel bands lie between two bins" in note for note in task.notes)
    assert not any("mel bands" in note for note in audio_task().notes)


def test_a_level_changes_nothing_and_silence_is_finite() -> None:
    task = audio_task()
    loud = torch.randint(-20000, 20000, (1, 1024), dtype=torch.int16)
    there = task.features(torch.cat((loud, loud // 4, torch.zeros_like(loud))))
    torch.testing.assert_close(there[0], there[1], atol=0.02, rtol=0)
    assert not there[2].any()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(task.features(loud), there[:1])


@pytest.mark.compat
def test_masks_stay_within_their_bounds_and_differ_between_recordings() -> None:
    masks = {"time_masks": 1, "time_mask": 5, "frequency_masks": 1, "frequency_mask": 7}
    task = audio_task(audio=masks)
    feature = torch.ones(200, 1, 32, 17)
    torch.manual_seed(3)
    masked = task._masked(feature)
    assert set(masked.unique().tolist()) == {0.0, 1.0}
    frames = (masked == 0).all(2)[:, 0].sum(1)
    bands = (masked == 0).all(3)[:, 0].sum(1)
    assert (int(frames.max()), int(bands.max())) == (4, 6), "shorter than the mask's parameter"
    assert len(frames.unique()) == 5 and len(bands.unique()) == 7
    for mask in ((masked == 0).all(2)[:, 0], (masked == 0).all(3)[:, 0]):
        changes = (mask[:, 1:] != mask[:, :-1]).sum(1)
        assert int(changes.max()) <= 2, "one stretch"
    assert feature.all(), "not in place"


def test_masks_are_for_training_only() -> None:
    seen: list[torch.Tensor] = []

    class Looks(torch.nn.Module):
        def forward(self, feature: torch.Tensor) -> torch.Tensor:
            seen.append(feature)
            return feature.mean((1, 2, 3))[:, None].expand(-1, 4)

    task = audio_task(audio={"time_masks": 2, "time_mask": 8})
    batch = batch_of(task, 8)
    task.loss(Looks(), batch)
    task.measure(Looks(), batch)
    torch.testing.assert_close(seen[1], task.inputs(batch)[0], atol=0, rtol=0)
    assert bool((seen[0] != seen[1]).any())


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


def test_the_embedded_recipe_learns_and_goes_on_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    chosen = recipe(
        optim={"lr": 0.01, "warmup_steps": 0.1}, epochs=3, audio={"time_masks": 1, "time_mask": 3}
    )
    task = make_task(chosen)
    state, losses = train_some(chosen, task, range(40))
    assert losses[0] == pytest.approx(math.log(16), abs=0.8)
    assert np.mean(losses[-5:]) < 0.8, losses
    half, first = train_some(chosen, task, range(17))
    resumed, last = train_some(chosen, task, range(17, 40), half)
    assert first + last == losses
    assert_same_bits(state, resumed)


@pytest.mark.slow  # the whole recipe; a shortened one runs above
def test_the_recipe_reads_99_of_100_keys(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "run"), "--set", "parallel.threads=1"]
    done = preloaded.run([sys.executable, "-m", "trainer", "train", "dtmf", *words], timeout=3600)
    assert done.returncode == 0, done.stderr
    (accuracy,) = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  accuracy")]
    assert float(accuracy) >= 0.99


def write(path: Path, rate: int = 8000) -> None:
    soundfile = pytest.importorskip("soundfile")
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.arange(999).astype(np.int16), rate)


def folder(root: Path) -> Recipe:
    return recipe(data={"name": "folder", "path": str(root), "micro_batch_size": 2, "global_batch_size": 2})


def test_the_lists_of_speech_commands_split_its_folder(tmp_path: Path) -> None:
    for word in ("yes", "no"):
        for number in range(5):
            write(tmp_path / word / f"{number}.wav")
    write(tmp_path / "_background_noise_" / "pink.wav")
    (tmp_path / "validation_list.txt").write_text("no/1.wav\nyes/0.wav\n")
    (tmp_path / "testing_list.txt").write_text("yes/4.wav\n")
    chosen = folder(tmp_path)
    task = make_task(chosen)
    check_request(chosen, task, 1)
    assert isinstance(task, Audio)
    assert task.audio.classes == ("no", "yes")
    assert (len(task.train_data), len(task.evaluation_data)) == (7, 2)
    out = {name: np.zeros((2, *f.shape), f.dtype) for name, f in task.evaluation_data.fields.items()}
    task.evaluation_data.read(np.arange(2), None, out)
    assert out[LABEL].tolist() == [0, 1]
    names = [task.train_data.records.file_name(n) for n in range(7)]  # type: ignore[attr-defined]
    assert not {b"no/1.wav", b"yes/0.wav", b"yes/4.wav"} & set(names)
    testing = make_task(
        chosen.model_copy(update={"audio": chosen.audio.model_copy(update={"part": "testing"})})
    )
    assert len(testing.evaluation_data) == 1
    # Recordings of the other list are neither trained on nor measured, nor is the noise.
    for made, count in ((task, [1, 1]), (testing, [2, 1])):
        assert [each.count for each in made.train_data.left_out] == count  # type: ignore[attr-defined]
    (tmp_path / "validation_list.txt").write_text("no/1.wav\nno/77.wav\n")
    with refused("validation_list.txt 2 no/77.wav"):
        make_task(chosen)
    (tmp_path / "validation_list.txt").unlink()
    with refused("validation_list.txt"):
        make_task(chosen)


def test_a_class_without_recordings_is_named(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write(tmp_path / part / "yes" / "0.wav")
        (tmp_path / part / "empty").mkdir()
    with refused("empty 0"):
        make_task(folder(tmp_path))
    write(tmp_path / "train" / "no" / "0.wav")
    with refused("no"):
        make_task(folder(tmp_path))


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        ({"highest": 5000}, "must be below"),
        ({"hop": 0.00001}, "too short"),
        ({"window": 2.0}, "longer than"),
    ],
)
def test_features_that_cannot_be_are_refused(audio: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(audio=audio)


def test_the_embedded_tones_have_one_rate() -> None:
    with pytest.raises(BadInputError, match=r"audio.sample_rate=8000 and audio.seconds=0.128"):
        make_task(recipe(audio={"sample_rate": 16000}))


def test_the_recipe_for_speech_commands_runs_dry() -> None:
    little = ["data.name=synthetic", "data.samples=40", "data.classes=35", "data.global_batch_size=8"]
    metrics = dry_run("speech-commands", [*little, "data.micro_batch_size=4", "model.width=8"])
    assert metrics["loss"] > 0 and 0 <= metrics["accuracy"] <= 1
