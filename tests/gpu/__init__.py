"""Tests that need a GPU."""

import pytest
import torch

GPU = torch.device("cuda", 0)
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
