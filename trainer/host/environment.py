"""The environment variables of our own. There are no others (tests/host/test_environment.py).

| variable | who sets it | what it says |
|---|---|---|
| `TRAINER_IMAGE_DIGEST` | who starts the container: unknown inside | the image, for the manifest |
| `TRAINER_RANK_OF` | a rank, for what it starts | that its RANK is inherited (`launch.nodes`) |

The launcher tells its ranks all else in a file that their command line names (`trainer.launch.folder`).
"""

IMAGE_DIGEST = "TRAINER_IMAGE_DIGEST"
RANK_MARK = "TRAINER_RANK_OF"
