#!/usr/bin/env bash
# A Docker engine for the container tests, on a Debian 12 machine that has none; and a base image where no
# registry can be reached.
#   engine.sh start [FOLDER]     start an engine in FOLDER (default /var/tmp/trainer-engine); print its environment
#   engine.sh stop [FOLDER]      stop it; what it stored stays
#   engine.sh clear [FOLDER]     stop it and delete what it stored
#   engine.sh stand-in TAG       import a small Debian with Python and a compiler as image TAG
# Trixie's packages are unpacked into FOLDER, because Debian 12's engine is too old; only what has to run as part
# of the system (runc, iptables, debootstrap) is installed.
set -euo pipefail

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

# Debian's own address on this machine, from where apt has it.
debian_mirror() {
    find /etc/apt \( -name '*.sources' -o -name '*.list' \) -exec cat {} + |
        awk '/^URIs:/ {print $2; exit} /^deb / {for (i = 2; i <= NF; i++) if ($i ~ /^http/) {print $i; exit}}'
}

fetch() {
    local root=$1 apt=$1/apt
    local packages=(docker.io docker-cli docker-buildx docker-compose containerd cosign)
    apt-get -q update
    DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends runc iptables debootstrap
    mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$root/system"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) trixie main" >"$apt/sources"
    : >"$apt/status"
    # An apt of its own, which knows nothing as installed: it must not touch the machine's packages.
    local options=(-q -o "Dir::Etc::SourceList=$apt/sources" -o "Dir::Etc::SourceParts=-" -o "Dir::State=$apt"
        -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt" -o "APT::Sandbox::User=root")
    apt-get "${options[@]}" update
    (cd "$apt/archives" && apt-get "${options[@]}" download "${packages[@]}")
    for package in "$apt"/archives/*.deb; do dpkg-deb -x "$package" "$root/system"; done
    mkdir -p "$root/config/cli-plugins"
    for plugin in docker-buildx docker-compose; do
        ln -sf "$(find "$root/system" -path "*cli-plugins/$plugin" -type f -print -quit)" "$root/config/cli-plugins/"
    done
}

environment() {
    echo "export DOCKER_HOST=unix://$1/docker.sock DOCKER_CONFIG=$1/config"
    echo "export PATH=$1/system/usr/bin:$1/system/usr/sbin:\$PATH"
}

start() {
    local root=$1
    [[ -x $root/system/usr/sbin/dockerd && -x $root/system/usr/bin/cosign ]] || fetch "$root" >&2
    eval "$(environment "$root")"
    if ! docker version >/dev/null 2>&1; then
        # The containerd image store exports OCI archives with rewritten timestamps. By default the builder deletes its
        # cache on a disk that is 80 % full, and makes every layer a second time: 15 GB more. The mirror is there while
        # tests/container/rehearsal.py runs.
        cat >"$root/daemon.json" <<END
{"features": {"containerd-snapshotter": true}, "builder": {"gc": {"enabled": false}},
 "registry-mirrors": ["http://127.0.0.1:${TRAINER_MIRROR_PORT:-5055}"]}
END
        PATH=$root/system/usr/libexec/docker:$PATH setsid dockerd --config-file "$root/daemon.json" \
            --host "$DOCKER_HOST" --data-root "$root/data" --exec-root "$root/exec" --pidfile "$root/dockerd.pid" \
            </dev/null >"$root/dockerd.log" 2>&1 &
        for _ in {1..120}; do
            if docker version >/dev/null 2>&1; then break; fi
            sleep 0.5
        done
        docker version >/dev/null || { tail -n 20 "$root/dockerd.log" >&2; exit 1; }
    fi
    environment "$root"
}

stand_in() {
    local tag=$1 here
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    tree=$(mktemp -d)
    trap 'rm -rf "$tree"' EXIT  # not a local: the trap runs outside
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv,python3-dev,g++,git,openssh-server \
        bookworm "$tree" "$(debian_mirror)" >&2
    rm -rf "$tree"/var/cache/apt "$tree"/var/lib/apt/lists/* "$tree"/var/log/* "$tree"/var/cache/ldconfig
    rm -f "$tree"/etc/ssh/ssh_host_*
    "$here/stand_in.py" "$tree"
    tar -C "$tree" --sort=name --mtime=@0 --numeric-owner -c . | docker import - "$tag"
}

# Processes of the engine in FOLDER: dockerd, containerd and its shims name the folder in their command lines.
engine_processes() {
    local folder process
    for folder in /proc/[0-9]*; do
        { process=$(tr '\0' ' ' <"$folder/cmdline"); } 2>/dev/null || continue  # it has ended
        case $process in
            *dockerd*" $1/"* | *containerd*" $1/"*) echo "${folder#/proc/}" ;;
        esac
    done
}

stop() {
    local pid
    [[ -s $1/dockerd.pid ]] || return 0
    pid=$(<"$1/dockerd.pid")
    # After a crash or a reboot the number may be somebody else's.
    grep -qs dockerd "/proc/$pid/comm" || return 0
    kill "$pid" 2>/dev/null || return 0
    while grep -qs dockerd "/proc/$pid/comm"; do sleep 0.1; done
}

clear_data() {
    local pids target
    stop "$1"
    # An engine that was killed leaves containerd and shims behind, and mounts: its folder onto itself, and below it a
    # root for each container. Both would keep the folder busy.
    mapfile -t pids < <(engine_processes "$1")
    for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    while read -r target; do
        umount --lazy "$target" || true
    done < <(awk -v below="$1/" 'index($5 "/", below) == 1 {print $5}' /proc/self/mountinfo | tac)
    rm -rf --one-file-system "$1/data" "$1/exec" "$1/dockerd.pid"
}

root=${2:-/var/tmp/trainer-engine}
case ${1:-} in
    start) start "$root" ;;
    stop) stop "$root" ;;
    clear) clear_data "$root" ;;
    stand-in) stand_in "${2:?engine.sh stand-in TAG}" ;;
    *) usage ;;
esac
