"""Promise: the embedded telephone tones are what ITU-T Q.23 and the data set's own description say."""

import numpy as np
import pytest

from trainer.data.builtin import dtmf
from trainer.data.formats.audio import AUDIO
from trainer.data.formats.records import LABEL

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def made() -> dtmf.Recordings:
    return dtmf.synthesize(1, np.arange(512))


def test_the_sound_has_the_two_frequencies_that_it_says(made: dtmf.Recordings) -> None:
    for row in range(0, 64, 7):
        tone = made.tone[row, made.start[row] : made.start[row] + made.duration[row]]
        around = np.fft.rfft(tone * np.hanning(len(tone)), 1 << 16)
        hertz = np.arange(len(around)) * dtmf.RATE / (1 << 16)
        level = []
        for expected in made.frequency[row]:
            near = np.abs(hertz - expected) < 60
            peak = np.abs(around) * near
            assert abs(hertz[peak.argmax()] - expected) < 4
            level.append(20 * np.log10(peak.max()))
        assert abs(level[1] - level[0] - made.twist[row]) < 0.5


def test_all_keys_are_equally_frequent_and_training_is_not_testing() -> None:
    train, test = (dtmf.recordings(part, 256).arrays for part in (0, 1))
    assert train is not None and test is not None
    for arrays in (train, test):
        assert np.bincount(arrays[LABEL].astype(int)).tolist() == [16] * 16
        assert arrays[AUDIO].dtype == np.int16
    assert not (train[AUDIO] == test[AUDIO]).all(1).any()
    assert "".join(dtmf.KEYS[k] for k in (0, 3, 12, 14, 15)) == "1A*#D"


def test_a_recording_depends_on_its_number_alone() -> None:
    few, many = dtmf.recordings(0, 40), dtmf.recordings(0, 1100)
    assert few.arrays is not None and many.arrays is not None
    np.testing.assert_array_equal(few.arrays[AUDIO], many.arrays[AUDIO][:40])
    one = dtmf.synthesize(0, np.array([39]))
    expected = np.clip(np.rint((one.tone + one.noise) * one.gain[:, None]), -32768, 32767)
    np.testing.assert_array_equal(few.arrays[AUDIO][39:], expected)
