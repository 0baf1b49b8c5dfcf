"""Allocators of GPU memory, and the environment that each needs.

PyTorch reads the choice when it is imported, so the launcher sets it in the environment of the ranks. See
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management.
"""

import re
from collections.abc import Callable, Mapping

from trainer.config.model import Allocator
from trainer.errors import BadInputError
from trainer.host.stacks import numbers

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # from 2.9 on, and before
# What cuBLAS needs to repeat its results; torch looks at it once, when a process first multiplies.
CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
_OPTIONS = {"expandable": ("expandable_segments", "True"), "async": ("backend", "cudaMallocAsync")}
_ASYNC_DRIVER = "470.42"  # the first that brings CUDA 11.4, which torch wants for cudaMallocAsync


def allocator_variables(choice: Allocator, environ: Mapping[str, str], version: str) -> dict[str, str]:
    """Returns the environment variables that ranks need for an allocator; options that the user set stay.

    Args:
        choice: `memory.allocator`.
        environ: Of the user.
        version: PyTorch's, such as "2.9.1+cu128".

    Raises:
        BadInputError: If the user's own options say otherwise.
    """
    if choice not in _OPTIONS:
        return {}
    key, value = _OPTIONS[choice]
    default = VARIABLES[numbers(version) < [2, 9]]
    name = next((variable for variable in VARIABLES if environ.get(variable)), default)
    given = _options(environ.get(name, ""))
    backend = given.get("backend", "native")
    clash = given.get(key, value) != value or (key == "expandable_segments" and backend != "native")
    if clash:
        raise BadInputError(
            f"memory.allocator={choice}: {name}={environ[name]} says otherwise; unset it, or leave "
            "memory.allocator at native"
        )
    return {
        name: environ[name] if key in given else ",".join(filter(None, (environ.get(name), f"{key}:{value}")))
    }


def check_allocator(
    choice: Allocator, environ: Mapping[str, str], driver_version: Callable[[], str | None]
) -> None:
    """Makes sure that a rank on GPUs has the allocator that the configuration names.

    Args:
        choice: `memory.allocator`.
        environ: Of the rank.
        driver_version: Gives that of NVIDIA's driver; None if it isn't known.

    Raises:
        BadInputError: If the driver is too old for it, or torch didn't hear of it.
    """
    driver = driver_version() if choice == "async" else None
    if driver is not None and numbers(driver) < numbers(_ASYNC_DRIVER):
        raise BadInputError(
            f"memory.allocator=async needs driver {_ASYNC_DRIVER} or newer, and here is {driver}; use "
            "native or expandable, or a newer driver"
        )
    if choice in _OPTIONS:
        key, value = _OPTIONS[choice]
        if not any(_options(environ.get(name, "")).get(key) == value for name in VARIABLES):
            raise BadInputError(
                f"memory.allocator={choice} is set before PyTorch starts: use `trainer train`, or export "
                f"{VARIABLES[0]}={key}:{value} before torchrun"
            )


def _options(text: str) -> dict[str, str]:
    """ "a:1,b:[2,3]" by name."""
    return dict(re.findall(r"(\w+)\s*:\s*(\[[^\]]*\]|[^,\s]+)", text))
