"""Promise: data made by code has the same fingerprint in every process, so that its runs can be resumed."""

import subprocess
import sys

from trainer.data.builtin.boxes import DigitsCanvas

CODE = "from trainer.data.builtin.boxes import DigitsCanvas as D; print(D(0, 4).fingerprint())"


def test_canvases_have_one_fingerprint_in_every_process() -> None:
    command = [sys.executable, "-c", CODE]
    printed = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert printed == {f"{DigitsCanvas(0, 4).fingerprint()}\n"}
