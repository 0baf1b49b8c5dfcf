"""The GPUs that a process may use: as CUDA_VISIBLE_DEVICES and the launcher of a rank say."""

import pytest

from tests.helpers.refusals import refused
from trainer.host.gpus import gpu_of_rank, visible_gpus

UUIDS = [f"GPU-{n}{n}-a" for n in range(4)]


@pytest.mark.parametrize(
    ("variable", "visible"),
    [("", []), ("2", ["2"]), ("1,4,2", ["1"]), ("GPU-22", ["GPU-22-a"]), ("MIG-1/2", ["MIG-1/2"])],
)
def test_what_the_variable_leaves(variable: str, visible: list[str]) -> None:
    assert visible_gpus(UUIDS, variable)[0] == visible
    assert visible_gpus([], variable)[0] == []


def test_a_rank_uses_the_gpu_that_it_sees() -> None:
    own = {"SLURM_LOCALID": "3"}  # srun --gpus-per-task=1: each task sees its own as number 0
    assert [gpu_of_rank(3, 8, {}), gpu_of_rank(3, 4, own), gpu_of_rank(3, 1, own)] == [3, 3, 0]
    for local, visible, environ in ((3, 2, own), (3, 1, {})):
        with refused(f"LOCAL_RANK={local}"):
            gpu_of_rank(local, visible, environ)
