# The image of a stack (stacks/STACK), for training (train) and for development (dev). Nothing in it comes from an
# unpinned source: bases by digest, conda packages and wheels by the hashes of the stack's locks, and this repository.
#
#   conda-base ──> tools ──> env ──┐     ┌──> code      the trainer, the last layer of both images
#                    └───────────┐ │     │
#                                ▼ ▼     │
#   debian-base ─────────────> wheels ───┴──> base ──┬──> train      what a cluster pulls
#                                                    └──> dev        + JupyterLab, git, sshd, conda
#
# `make image STACK=…` (scripts/image.py) gives each stack's arguments and labels; docs/image.md says more. `ca` is for
# networks with a certificate authority of their own; elsewhere it is not given.

# Both can be replaced: --build-context conda-base=docker-image://… The locks are for this platform, whatever the host's is.
# hadolint ignore=DL3029
FROM --platform=linux/amd64 continuumio/miniconda3:26.7.1-1@sha256:eca594d684f495c1a02beff33a9fab53aec8c5830eaf431bb149912dc6c9e4c1 AS conda-base
# hadolint ignore=DL3029
FROM --platform=linux/amd64 debian:13.5-slim@sha256:28de0877c2189802884ccd20f15ee41c203573bd87bb6b883f5f46362d24c5c2 AS debian-base

# What installs, in no image: scripts, and uv by its hash. First, whether the stack has this torch and needs this driver.
FROM conda-base AS tools
ARG STACK=torch2.9-cu128
ARG TORCH_VERSION=2.9.1
ARG DRIVER=525.60.13
COPY scripts/conda_env.py scripts/install_wheels.py scripts/locks.py scripts/prune_env.py /tools/
RUN --mount=type=bind,source=stacks,target=/stacks --mount=type=secret,id=ca \
    for line in "torch = \"$TORCH_VERSION\"" "floor = \"$DRIVER\""; do \
        grep -qsF "$line" "/stacks/$STACK/stack.toml" || \
            { echo "STACK=$STACK hasn't $line: make image STACK=… builds one of" /stacks/*/ >&2; exit 2; }; \
    done; \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    /opt/conda/bin/python -B /tools/locks.py "/stacks/$STACK/wheels.lock" /tools

# Python and native tools, by conda from an explicit lock.
FROM tools AS env
ARG STACK=torch2.9-cu128
ARG CONDA_LOCKS=/stacks/${STACK}
ARG CONDA_MIRROR=
ARG ALLOW_MD5=
ARG SOURCE_DATE_EPOCH
RUN --mount=type=bind,source=stacks,target=/stacks \
    --mount=type=cache,target=/var/cache/conda-packages --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    /opt/conda/bin/python -B /tools/conda_env.py "$CONDA_LOCKS/conda.lock" /opt/env \
        --conda /opt/conda/bin/conda --cache /var/cache/conda-packages \
        ${CONDA_MIRROR:+--mirror "$CONDA_MIRROR"} ${ALLOW_MD5:+--allow-md5 $ALLOW_MD5}

# PyTorch and what the trainer needs, wheels by hash; then scripts/prune_env.py removes what nothing uses, and bytecode is written.
FROM debian-base AS wheels
ARG STACK=torch2.9-cu128
ARG SOURCE_DATE_EPOCH
COPY --link --from=env /opt/env /opt/env
RUN --mount=type=bind,source=stacks,target=/stacks --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=cache,target=/var/cache/uv --mount=type=secret,id=ca --mount=type=tmpfs,target=/tmp \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    UV_CACHE_DIR=/var/cache/uv /opt/env/bin/python -B /tools/install_wheels.py "/stacks/$STACK/wheels.lock" \
        /opt/env train image --uv /tools/uv --prune /opt/image/removed.json && \
    echo /opt/trainer > "$(/opt/env/bin/python -B -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/trainer.pth"

# The trainer, installed into a folder of its own: a change to it changes this layer alone.
FROM wheels AS code
RUN --mount=type=bind,target=/source --mount=type=bind,from=tools,source=/tools,target=/tools --mount=type=tmpfs,target=/tmp \
    cp -r /source/pyproject.toml /source/README.md /source/LICENSE /source/trainer /tmp && \
    PYTHONDONTWRITEBYTECODE=1 UV_NO_INSTALLER_METADATA=1 UV_PYTHON_DOWNLOADS=never /tools/uv pip install --no-cache --offline \
        --python /opt/env/bin/python --no-deps --no-build-isolation --target /opt/trainer /tmp && \
    /opt/env/bin/python -B -m compileall -qq --invalidation-mode unchecked-hash /opt/trainer && \
    rm -f /opt/trainer/.lock

# A user, folders that any user may write to, and the settings. All that must hold stands in ENV: Kubernetes'
# `command:`, Pyxis and `apptainer exec` go round the entrypoint.
FROM wheels AS base
ARG STACK=torch2.9-cu128
ARG SOURCE_DATE_EPOCH
ARG TORCH_VERSION=2.9.1
ARG DRIVER=525.60.13
RUN echo 'trainer:*:1000:1000::/home/trainer:/bin/bash' >> /etc/passwd && \
    echo 'trainer:x:1000:' >> /etc/group && \
    mkdir -p /home/trainer /cache /workspace && chmod 1777 /home/trainer /cache /workspace && \
    echo '. /opt/image/bashrc' >> /etc/bash.bashrc && \
    find / -xdev -perm /6000 -type f -exec chmod a-s {} +
COPY --chmod=755 scripts/entrypoint scripts/healthy scripts/bashrc scripts/as_owner.py scripts/on_top.py scripts/tensorboard_once.py /opt/image/
COPY --chmod=644 scripts/profile.sh /etc/profile.d/trainer.sh
# Last in it, what the user adds: packages on top never come before the image's.
ENV PATH=/opt/trainer/bin:/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/workspace/.packages/${STACK}/bin \
    LANG=C.UTF-8 \
    PYTHONNOUSERSITE=1 \
    PYTHONUNBUFFERED=1 \
    # An arbitrary UID has no passwd entry, and getpass and inductor ask for a name.
    HOME=/home/trainer USER=trainer LOGNAME=trainer \
    # JupyterLab's terminals are this.
    SHELL=/bin/bash \
    # All caches in one folder, to be mounted.
    XDG_CACHE_HOME=/cache \
    TORCH_HOME=/cache/torch \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    MPLCONFIGDIR=/cache/matplotlib \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    # NVIDIA's runtime starts no container on an older one.
    NVIDIA_REQUIRE_CUDA=driver>=${DRIVER} \
    # Where GKE's device plugin mounts the node's driver.
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    # enroot's hook for Slurm tells ranks their numbers only where this is set.
    PYTORCH_VERSION=${TORCH_VERSION}
RUN --mount=type=bind,source=scripts/packages_on_top.py,target=/packages_on_top.py \
    /opt/env/bin/python -B /packages_on_top.py "$STACK" /opt/image/constraints.txt
WORKDIR /workspace
USER 1000:1000
# A first process that passes signals on and buries orphans: not every runtime has one.
ENTRYPOINT ["/opt/env/bin/dumb-init", "--", "/opt/image/entrypoint"]

FROM base AS train
CMD ["trainer", "--help"]
COPY --from=code /opt/trainer /opt/trainer

FROM base AS dev
ARG STACK=torch2.9-cu128
ARG CONDA_LOCKS=/stacks/${STACK}
ARG CONDA_MIRROR=
ARG SOURCE_DATE_EPOCH
USER 0:0
COPY --link --from=conda-base /opt/conda /opt/conda
ENV PATH=$PATH:/opt/conda/condabin
# Adds to the environment, so that this layer holds only what is new.
RUN --mount=type=bind,source=stacks,target=/stacks --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,source=scripts/packages_on_top.py,target=/packages_on_top.py \
    --mount=type=cache,target=/var/cache/uv --mount=type=cache,target=/var/cache/conda-packages \
    --mount=type=secret,id=ca --mount=type=tmpfs,target=/tmp \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    /opt/conda/bin/python -B /tools/conda_env.py "$CONDA_LOCKS/conda-dev.lock" /opt/env --add \
        --conda /opt/conda/bin/conda --cache /var/cache/conda-packages ${CONDA_MIRROR:+--mirror "$CONDA_MIRROR"} && \
    UV_CACHE_DIR=/var/cache/uv /opt/env/bin/python -B /tools/install_wheels.py "/stacks/$STACK/wheels.lock" \
        /opt/env dev --uv /tools/uv && \
    printf 'channels: [conda-forge]\ndefault_channels: []\n' > /opt/conda/.condarc && \
    /opt/env/bin/python -B /packages_on_top.py "$STACK" /opt/image/constraints.txt
USER 1000:1000
EXPOSE 8888 6006
HEALTHCHECK --timeout=10s --start-period=60s CMD ["/opt/image/healthy"]
CMD ["jupyter"]
COPY --from=code /opt/trainer /opt/trainer
