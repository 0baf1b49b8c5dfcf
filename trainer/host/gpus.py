"""GPUs that a process may use, and those requested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.errors import BadInputError


def visible_gpus(uuids: Sequence[str], variable: str | None) -> tuple[list[str], str]:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES leaves (numbers, whole UUIDs, MIG slices), and its first
    invalid word, or "".

    As CUDA reads it: of a UUID the first letters do, and from the first wrong word on nothing counts.

    Args:
        uuids: Of the host's GPUs, by their numbers.
        variable: Its value; None if it isn't set.
    """
    if variable is None:
        return [str(number) for number in range(len(uuids))], ""
    visible: list[str] = []
    for word in (part.strip() for part in variable.split(",")):
        whole = [uuid for uuid in uuids if word.startswith("GPU-") and uuid.startswith(word)]
        if (word.isdecimal() and len(word) < 5 and int(word) < len(uuids)) or (
            word.startswith("MIG-") and uuids
        ):
            visible.append(word)
        elif len(whole) == 1:
            visible += whole
        else:
            return visible, word
    return visible, ""


def chosen_gpus(request: str, visible: Sequence[str]) -> list[str]:
    """The GPUs of `--gpus`, out of those that CUDA_VISIBLE_DEVICES leaves; never one more.

    Args:
        request: A count ("2"), indices ("0,1"), or indices that say so ("id:1", "id:0,1").
        visible: What names each visible GPU; indices count these.

    Raises:
        BadInputError: If it is neither, or names a GPU that isn't there.
    """
    listed = request.startswith("id:")
    words = request[3 * listed :].split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 5 for word in words):
        raise BadInputError(
            f"--gpus {request}: give a count (2), a list of indices (0,1) or a single index (id:1)"
        )
    indices = [int(word) for word in words] if listed or len(words) > 1 else list(range(int(words[0])))
    if not indices or max(indices) >= len(visible) or len(set(indices)) < len(indices):
        numbered = ", numbered from 0" if visible else ""
        raise BadInputError(f"--gpus {request}: there are {len(visible)} GPUs here{numbered}")
    return [visible[index] for index in indices]


def gpu_of_rank(local_rank: int, visible: int, environ: Mapping[str, str]) -> int:
    """Returns the index of a rank's GPU among those that its process sees.

    That is its local rank, but a task of srun with --gpus-per-task or --gpu-bind=single sees its own alone.

    Args:
        local_rank: The rank's number on this host.
        visible: Number of GPUs that its process sees.
        environ: The process's environment.

    Raises:
        BadInputError: If it sees too few.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1 and environ.get("SLURM_LOCALID") == str(local_rank):
        return 0
    raise BadInputError(
        f"LOCAL_RANK={local_rank}: this rank sees {visible} GPUs, numbered from 0; start as many ranks on "
        "each node as there are GPUs, and let each see all of them or its own alone (CUDA_VISIBLE_DEVICES, "
        "or srun's --gpus-per-node, --gpu-bind)"
    )
