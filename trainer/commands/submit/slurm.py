"""A batch script for Slurm: the image by Pyxis or Apptainer, or an environment that every node has.

One task on each node: our launcher, which finds the others by Slurm's variables. Slurm sends USR1 to every
process of the step before the time is up (without `B:`, which would reach the script alone); the ranks write
a checkpoint and end with code 75, and the script puts the job back in the queue: not rank 0, because in the
image there is no scontrol. Sources: sbatch(1), srun(1), scontrol(1) of Slurm 22.05; the READMEs of Pyxis and
Apptainer.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.submit.container import CACHE, DATA, RUNS_MOUNT, files, words
from trainer.commands.submit.environment import from_files
from trainer.commands.submit.spec import JobSpec, Site, folder_of
from trainer.errors import BadInputError

_LOGS = ".jobs"
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
# A line break begins another directive, and a blank another option; Unicode's breaks end lines, too.
_DIRECTIVE = re.compile(r"""[^\\"'#\s\x00-\x1f\x7f-\x9f\u2028\u2029]*""")
_VALUE = re.compile(r"""[^\\"'\x00-\x1f\x7f-\x9f\u2028\u2029]*""")
# Options of sbatch that the script has, or can't have, and what to give instead.
_OURS = {
    **{"job-name": "give --name", "partition": "give --partition", "account": "give --account"},
    **{"qos": "give --qos", "nodes": "give --nnodes", "cpus-per-task": "give --cpus-per-node"},
    **{"gpus-per-node": "give --gpus-per-node", "mem": "give --memory", "time": "give --time"},
    **{"signal": "give --grace", "output": "give --runs, below which logs lie", "array": "give --sweep"},
    **{"mem-per-cpu": "give --memory", "mem-per-gpu": "give --memory", "error": "it is in the log"},
    **{"export": "give --env, or --env-from file:PATH"},
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node"), "each node has one task, the launcher of its ranks"
    ),
    **dict.fromkeys(("requeue", "no-requeue"), "the script requeues the job after its checkpoint"),
    **{"no-kill": "give --nnodes MIN:MAX", "open-mode": "the log is appended to", "wrap": "it is a script"},
}
_AFTER_THE_FIRST_SECONDS = 60
# srun takes options from the latter, and sbatch passes on those of the job in whose shell it runs.
_NOT_FROM_OUTSIDE = (
    "NNODES NODE_RANK MASTER_ADDR RANK WORLD_SIZE LOCAL_RANK "
    "PET_NNODES PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT PET_RDZV_ENDPOINT "
    "SLURM_CPUS_PER_TASK SLURM_TRES_PER_TASK SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_GPUS "
    "SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_MEM_BIND SLURM_CPU_BIND SLURM_CPU_BIND_LIST "
    "SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE"
)
_VERBS = "/dev/infiniband"
_MORE_PORTS = 999  # the highest that job numbers add to the port


def render(spec: JobSpec, site: Site) -> str:
    """Renders the script of one job.

    Raises:
        BadInputError: If the job can't run there.
    """
    return render_array([spec], site, spec.name)


def render_array(specs: Sequence[JobSpec], site: Site, name: str) -> str:
    """Renders the script of an array, a task per job; jobs may differ only in recipe, settings and name.

    Args:
        specs: The jobs.
        site: The cluster's settings.
        name: Name of the array and of its logs.

    Raises:
        BadInputError: If the jobs differ otherwise, or can't run there.
    """
    spec, several = specs[0], len(specs) > 1
    for other in specs:
        if other.model_copy(update=_own(spec)) != spec:
            raise BadInputError(
                "the jobs of an array share their resources: only recipe and settings may differ"
            )
    if site.container != "venv" and not spec.image:
        raise BadInputError(f"--container {site.container} needs an image: give --image, or --container venv")
    if spec.port + _MORE_PORTS > 65535:
        raise BadInputError(
            f"--port {spec.port}: on Slurm up to {_MORE_PORTS} are added, by the job's number; lower it"
        )
    runs = folder_of("slurm", "runs", spec.runs)
    lines = [
        "#!/bin/bash",
        "# Rendered by `trainer submit --on slurm`.",
        *_resources(specs, site, runs, name),
        "",
        "set -u",
    ]
    lines += [
        "# What the submitter's shell happened to say of another job isn't said of this one.",
        f"unset {_NOT_FROM_OUTSIDE}",
    ]
    if spec.min_nnodes is not None:
        lines.append(f"export NNODES={spec.nnodes_text}")
    lines += [
        "# Jobs that share a node get ports of their own.",
        f"export MASTER_PORT=$(({spec.port} + SLURM_JOB_ID % 1000))",
        *(line for path in from_files(site) for line in _reads(path)),
        *(f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()),
        *(_LOCKS if site.rdma else []),
        f'if [ "$(df --output=size -k /dev/shm | tail -n 1)" -lt $(({spec.shm_gib} * 1048576)) ]; then',
        f"    echo 'warning: /dev/shm of this node is smaller than {spec.shm_gib} GiB' >&2",
        "fi",
        f"mkdir -p {shlex.quote(str(runs))}",
    ]
    if several:
        lines.append("case $SLURM_ARRAY_TASK_ID in")
        for number, one in enumerate(specs):
            folder = shlex.quote(f"{runs}/{one.name}")
            lines.append(f"    {number}) run={folder}; set -- {shlex.join(_command(one, site, runs))} ;;")
        lines.append("esac")
    else:
        lines.append(f"run={shlex.quote(f'{runs}/{spec.name}')}")
        lines.append(f"set -- {shlex.join(_command(spec, site, runs))}")
    return "\n".join([*lines, "", *_step(spec, site, runs), "code=$?", *_AFTERWARDS]) + "\n"


# Verbs register memory by locking it. The limit is that of the node's slurmd.
_LOCKS = [
    'ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -H -l)"',
    '[ "$(ulimit -l)" = unlimited ] || echo "warning: RDMA may lock only $(ulimit -l) KiB (ulimit -l)" >&2',
]


def _reads(path: Path) -> list[str]:
    """Exports the variables of a file when the job runs, so that they stand in no script."""
    return [
        'while IFS= read -r line || [ -n "$line" ]; do',
        '    case $line in "" | "#"*) ;; *) export "${line?}" ;; esac',
        f"done < {shlex.quote(str(path))} || exit 2",
    ]


# A job that was cancelled ends with 75 as well; it isn't to come back.
_AFTERWARDS = [
    "job=$SLURM_JOB_ID",
    '[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID',
    'if [ "$code" -eq 75 ]; then',
    '    state=$(scontrol show job --oneliner "$job" |',
    "        sed -n 's/.* JobState=\\([A-Z]*\\).*/\\1/p')",
    '    if [ "$state" = RUNNING ]; then',
    '        echo "requeued, number $((${SLURM_RESTART_COUNT:-0} + 1)): it resumes from its checkpoint" >&2',
    '        scontrol requeue "$job" && sleep 60',
    "    fi",
    "fi",
    'exit "$code"',
]


def _own(spec: JobSpec) -> dict[str, object]:
    return {"recipe": spec.recipe, "settings": spec.settings, "name": spec.name}


def _resources(specs: Sequence[JobSpec], site: Site, runs: Path, name: str) -> list[str]:
    spec = specs[0]
    log = f"{runs}/{_LOGS}/{name}-" + ("%A_%a.out" if len(specs) > 1 else "%j.out")
    if re.search(r"\s", log):
        raise BadInputError(f"--runs {runs}: Slurm takes no blanks in the path of a log; give another folder")
    options = {
        "job-name": name,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "array": f"0-{len(specs) - 1}" if len(specs) > 1 else None,
        "nodes": str(spec.nnodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(spec.cpus_per_node),
        "gpus-per-node": str(spec.gpus_per_node) if spec.gpus_per_node else None,
        "mem": f"{spec.memory_gib}G",
        "time": str(spec.minutes),
        "signal": f"USR1@{spec.stop_seconds}",
        "output": log,
        "open-mode": "append",
    }
    flags = ["--requeue", *(["--no-kill"] if spec.min_nnodes is not None else [])]
    flags += _given(site)
    for option, value in options.items():
        if value is not None and not _DIRECTIVE.fullmatch(value):
            raise BadInputError(
                f"--{option.replace('job-name', 'name').replace('output', 'runs')} {value!r}: quotes, \\, "
                "blanks, # and control characters can't stand in a line of #SBATCH; give it without"
            )
    lines = [f"#SBATCH --{option}={value}" for option, value in options.items() if value is not None]
    return [*lines, *(f"#SBATCH {flag}" for flag in flags)]


def _given(site: Site) -> list[str]:
    """Returns the options of --sbatch-arg; the last of duplicates wins."""
    found = {}
    for word in site.sbatch_arg:
        name, equals, value = word.lstrip("-").partition("=")
        if not _OPTION.fullmatch(name):
            raise BadInputError(
                f"--sbatch-arg {word}: give a long option of sbatch, as --sbatch-arg=--constraint=h100"
            )
        # sbatch takes abbreviations, too.
        if ours := next((instead for one, instead in _OURS.items() if one.startswith(name)), None):
            raise BadInputError(f"--sbatch-arg {word}: {ours}")
        if not _VALUE.fullmatch(value):
            raise BadInputError(f"--sbatch-arg {word}: quotes, \\ and line breaks can't be given on")
        # As sbatch reads it: to it # begins a comment.
        found[name] = f"--{name}{equals}" + (f"'{value}'" if re.search("[ #]", value) else value)
    return list(found.values())


def _command(spec: JobSpec, site: Site, runs: Path) -> list[str]:
    if site.container != "venv":
        return words(spec)
    data = "" if spec.data is None else str(folder_of("slurm", "data", spec.data))
    command = spec.command(str(runs), data)
    return [str(Path(site.venv).absolute() / "bin" / "trainer"), *command[1:]]


def _step(spec: JobSpec, site: Site, runs: Path) -> list[str]:
    """Returns the lines of srun: a task on each node."""
    # All launchers end within a second and with one code, which srun would hide if it killed the slower.
    # A node that leaves an elastic job is no reason to end the others at all.
    # sbatch's own --no-kill doesn't hold for its steps.
    ends = (
        ["--wait=0", "--no-kill"] if spec.min_nnodes is not None else [f"--wait={_AFTER_THE_FIRST_SECONDS}"]
    )
    # From 22.05 on srun doesn't take this from sbatch, and a node that binds its steps gives it one core.
    cpus = f"--cpus-per-task={spec.cpus_per_node}"
    srun = ["srun", f"--nodes={spec.nnodes}", "--ntasks-per-node=1", cpus, "--kill-on-bad-exit=0", *ends]
    if site.container == "venv":
        return [f'{shlex.join(srun)} "$@"']
    mounts = [f"{runs}:{RUNS_MOUNT}"]
    mounts += [f"{file}:{target}:ro" for file, target in files(spec)]
    if spec.data is not None:
        mounts.append(f"{folder_of('slurm', 'data', spec.data)}:{DATA}:ro")
    if spec.cache is not None:
        mounts.append(f"{folder_of('slurm', 'cache', spec.cache)}:{CACHE}")
    if site.rdma:
        mounts.append(f"{_VERBS}:{_VERBS}")
    if site.container == "pyxis":
        srun += [f"--container-image={_enroot(spec.image)}", f"--container-mounts={','.join(mounts)}"]
        srun += ["--no-container-mount-home", "--container-workdir=/workspace"]
        return [f'{shlex.join(srun)} "$@"']
    # It empties the environment; what Slurm and this script say must come through.
    secret = [name for names in from_files(site).values() for name in names]
    names = "|".join(["SLURM_", "NNODES", "MASTER_", "CUDA_VISIBLE_DEVICES", *spec.environment, *secret])
    image = spec.image if Path(spec.image).suffix == ".sif" else f"docker://{spec.image}"
    binds = [*mounts, *([] if spec.cache is not None else ['"$scratch/cache:/cache"'])]
    apptainer = [
        "apptainer",
        "exec",
        *(["--nv"] if spec.gpus_per_node else []),
        "--containall",
        "--pwd=/workspace",
    ]
    return [
        "# shellcheck disable=SC2329  # srun's shells call it",
        "in_the_image() { # its shell must outlive the signals that Slurm sends to every process",
        "    trap '' USR1 TERM",
        '    scratch=$(mktemp -d) && mkdir "$scratch/cache" "$scratch/tmp" || exit 1',
        f"    for name in $(compgen -e | grep -E '^({names})'); do",
        '        export "APPTAINERENV_$name=${!name}"',
        "    done",
        f'    {shlex.join(apptainer)} --bind "$scratch/tmp:/tmp" '
        + " ".join(f"--bind {one if one.startswith(chr(34)) else shlex.quote(one)}" for one in binds)
        + f' {shlex.quote(image)} "$@"',
        "    code=$?",
        '    rm -rf "$scratch"',
        '    exit "$code"',
        "}",
        "export -f in_the_image",
        f'{shlex.join(srun)} bash -c \'in_the_image "$@"\' - "$@"',
    ]


def _enroot(image: str) -> str:
    """Formats a reference as enroot does: `#` after the registry's host, and no tag beside a digest."""
    image = re.sub(r":[^:/@]+@", "@", image)
    host, slash, rest = image.partition("/")
    if image.startswith(("/", "./")) or image.endswith(".sqsh"):
        return image
    return f"{host}#{rest}" if slash and ("." in host or ":" in host or host == "localhost") else image
