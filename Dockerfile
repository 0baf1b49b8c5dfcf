# The image of a stack (stacks/STACK), for training (train) and for development (dev). Nothing in it comes from an
# unpinned source: bases by digest, conda packages and wheels by the hashes of the stack's locks, and this repository.
#
#   conda-base ──> stack ──> env ──┐     ┌──> code      the trainer, the last layer of both images
#                    └─────> uv ─┐ │     │
#                                ▼ ▼     │
#   debian-base ─────────────> wheels ───┴──> base ──┬──> train      what a cluster pulls
#                                                    └──> dev        + JupyterLab, git, sshd, conda
#
# Build it with `make image STACK=…` (scripts/image.py), which gives each stack's arguments and labels; docs/image.md
# says more. `ca` is for networks with a certificate authority of their own; elsewhere it is not given.

# Both bases can be replaced: --build-context conda-base=docker-image://…
# The locks are for this platform, whatever the host's is.
# hadolint ignore=DL3029
FROM --platform=linux/amd64 continuumio/miniconda3:26.7.1-1@sha256:eca594d684f495c1a02beff33a9fab53aec8c5830eaf431bb149912dc6c9e4c1 AS conda-base
# hadolint ignore=DL3029
FROM --platform=linux/amd64 debian:13.5-slim@sha256:28de0877c2189802884ccd20f15ee41c203573bd87bb6b883f5f46362d24c5c2 AS debian-base

# Only a question, before any package is downloaded: whether what builds this knows the stack.
FROM conda-base AS stack
ARG STACK=torch2.9-cu128
ARG TORCH_VERSION=2.9.1
RUN --mount=type=bind,source=stacks,target=/stacks \
    if [ ! -f "/stacks/$STACK/stack.toml" ]; then \
        for file in /stacks/*/stack.toml; do name=${file%/stack.toml}; set -- "$@" "${name#/stacks/}"; done; \
        echo "no stack '$STACK': there are $*" >&2; exit 2; \
    elif line="torch = \"$TORCH_VERSION\"" && ! grep -qxF -e "$line" -e "$line$(printf '\r')" "/stacks/$STACK/stack.toml"; then \
        echo "TORCH_VERSION=$TORCH_VERSION isn't that of $STACK: build its images with make image STACK=$STACK" >&2; exit 2; \
    fi

# Python and native tools, by conda from an explicit lock.
FROM stack AS env
ARG STACK=torch2.9-cu128
ARG CONDA_LOCKS=/stacks/${STACK}
ARG CONDA_MIRROR=
ARG ALLOW_MD5=
ARG SOURCE_DATE_EPOCH
RUN --mount=type=bind,source=stacks,target=/stacks \
    --mount=type=bind,source=scripts/conda_env.py,target=/scripts/conda_env.py \
    --mount=type=bind,source=scripts/explicit_lock.py,target=/scripts/explicit_lock.py \
    --mount=type=cache,target=/var/cache/conda-packages --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    exec /opt/conda/bin/python -B /scripts/conda_env.py "$CONDA_LOCKS/conda.lock" /opt/env \
        --conda /opt/conda/bin/conda --cache /var/cache/conda-packages \
        ${CONDA_MIRROR:+--mirror "$CONDA_MIRROR"} ${ALLOW_MD5:+--allow-md5 $ALLOW_MD5}

# The installer of wheels; in no image.
FROM stack AS uv
ARG STACK=torch2.9-cu128
RUN --mount=type=bind,source=stacks,target=/stacks \
    --mount=type=bind,source=scripts/wheels.py,target=/scripts/wheels.py --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi; \
    /opt/conda/bin/python -B /scripts/wheels.py "/stacks/$STACK/wheels.lock" uv > /tmp/uv.txt && \
    /opt/conda/bin/python -m pip install --disable-pip-version-check --no-cache-dir --progress-bar=off \
        --require-hashes --no-deps --target /opt/uv -r /tmp/uv.txt

# PyTorch and what the trainer needs, wheels by hash; then what nothing uses is removed (scripts/prune_env.py says
# why each, and what it saves), and bytecode written.
FROM debian-base AS wheels
ARG STACK=torch2.9-cu128
ARG SOURCE_DATE_EPOCH
COPY --link --from=env /opt/env /opt/env
RUN --mount=type=bind,source=stacks,target=/stacks \
    --mount=type=bind,source=scripts/install_wheels.py,target=/scripts/install_wheels.py \
    --mount=type=bind,source=scripts/prune_env.py,target=/scripts/prune_env.py \
    --mount=type=bind,source=scripts/wheels.py,target=/scripts/wheels.py \
    --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    --mount=type=cache,target=/var/cache/uv --mount=type=secret,id=ca --mount=type=tmpfs,target=/tmp \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    export UV_CACHE_DIR=/var/cache/uv; \
    /opt/env/bin/python -B /scripts/install_wheels.py "/stacks/$STACK/wheels.lock" /opt/env \
        --groups train image --uv /opt/uv/bin/uv --prune /opt/image/removed.json && \
    site=$(/opt/env/bin/python -B -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
    echo /opt/trainer > "$site/trainer.pth"

# The trainer, installed into a folder of its own: a change to it changes this layer alone.
FROM wheels AS code
# Set by `image.py verify`, so that what it builds anew is never taken for what was built before.
ARG VERIFY=
RUN --mount=type=bind,target=/source --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv \
    --mount=type=tmpfs,target=/tmp \
    cp -r /source/pyproject.toml /source/README.md /source/LICENSE /source/trainer /tmp && \
    PYTHONDONTWRITEBYTECODE=1 UV_NO_INSTALLER_METADATA=1 UV_PYTHON_DOWNLOADS=never /opt/uv/bin/uv pip install --no-cache --offline \
        --python /opt/env/bin/python --no-deps --no-build-isolation --target /opt/trainer /tmp && \
    /opt/env/bin/python -B -m compileall -qq --invalidation-mode unchecked-hash /opt/trainer && \
    rm -f /opt/trainer/.lock

# A user, folders that any user may write to, and the settings. All that must hold stands in ENV: Kubernetes'
# `command:`, Pyxis and `apptainer exec` go round the entrypoint.
FROM wheels AS base
ARG STACK=torch2.9-cu128
ARG SOURCE_DATE_EPOCH
ARG TORCH_VERSION=2.9.1
ARG VERIFY=
RUN echo 'trainer:*:1000:1000::/home/trainer:/bin/bash' >> /etc/passwd && \
    echo 'trainer:x:1000:' >> /etc/group && \
    mkdir -p /home/trainer /cache /workspace && chmod 1777 /home/trainer /cache /workspace && \
    echo '. /opt/image/bashrc' >> /etc/bash.bashrc && \
    find / -xdev -perm /6000 -type f -exec chmod a-s {} +
COPY --chmod=755 scripts/entrypoint scripts/bashrc scripts/as_owner.py scripts/tensorboard_once.py /opt/image/
COPY --chmod=755 scripts/on_top.py /opt/image/on-top
COPY --chmod=755 scripts/uv /opt/image/bin/uv
COPY --chmod=644 scripts/profile.sh /etc/profile.d/trainer.sh
# From a checkout of Windows' they come with line ends that no shell and no #! reads.
RUN for file in entrypoint bashrc as_owner.py tensorboard_once.py on-top bin/uv ../../etc/profile.d/trainer.sh; do \
        sed -i 's/\r$//' "/opt/image/$file" || exit; \
    done
# Last in it, what the user adds: packages on top never come before the image's.
ENV PATH=/opt/trainer/bin:/opt/env/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/image/bin:/workspace/.packages/${STACK}/bin \
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

# What the image holds, asked of its libraries: scripts/image.py compares that with stack.toml, and labels by it.
FROM train AS asked
RUN --network=none --mount=type=bind,source=scripts/image_facts.py,target=/scripts/image_facts.py \
    python -B /scripts/image_facts.py > /tmp/facts.json
FROM scratch AS facts
COPY --from=asked /tmp/facts.json /

# What the stages above `wheels` make for train, without what lies below: small enough to build twice in a test.
FROM scratch AS above
COPY --from=base /etc/passwd /etc/group /etc/
COPY --from=base /opt/image/entrypoint /opt/image/environment /opt/image/
COPY --from=code /opt/trainer /opt/trainer

FROM base AS dev
ARG STACK=torch2.9-cu128
ARG CONDA_LOCKS=/stacks/${STACK}
ARG CONDA_MIRROR=
ARG SOURCE_DATE_EPOCH
USER 0:0
COPY --link --from=conda-base /opt/conda /opt/conda
# Adds to the environment, so that this layer holds only what is new.
RUN --mount=type=bind,source=stacks,target=/stacks \
    --mount=type=bind,source=scripts/conda_env.py,target=/scripts/conda_env.py \
    --mount=type=bind,source=scripts/explicit_lock.py,target=/scripts/explicit_lock.py \
    --mount=type=bind,source=scripts/install_wheels.py,target=/scripts/install_wheels.py \
    --mount=type=bind,source=scripts/prune_env.py,target=/scripts/prune_env.py \
    --mount=type=bind,source=scripts/wheels.py,target=/scripts/wheels.py \
    --mount=type=bind,from=uv,source=/opt/uv,target=/opt/uv --mount=type=cache,target=/var/cache/uv \
    --mount=type=cache,target=/var/cache/conda-packages --mount=type=secret,id=ca --mount=type=tmpfs,target=/tmp \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi; \
    /opt/conda/bin/python -B /scripts/conda_env.py "$CONDA_LOCKS/conda-dev.lock" /opt/env --add \
        --conda /opt/conda/bin/conda --cache /var/cache/conda-packages ${CONDA_MIRROR:+--mirror "$CONDA_MIRROR"} && \
    UV_CACHE_DIR=/var/cache/uv /opt/env/bin/python -B /scripts/install_wheels.py "/stacks/$STACK/wheels.lock" \
        /opt/env --groups dev --uv /opt/uv/bin/uv && \
    printf 'channels: [conda-forge]\ndefault_channels: []\n' > /opt/conda/.condarc
ENV PATH=$PATH:/opt/conda/condabin
RUN --mount=type=bind,source=scripts/packages_on_top.py,target=/packages_on_top.py \
    /opt/env/bin/python -B /packages_on_top.py "$STACK" /opt/image/constraints.txt
USER 1000:1000
EXPOSE 8888 6006
CMD ["jupyter"]
COPY --from=code /opt/trainer /opt/trainer
