#!/bin/sh
# Builds container engines and clients newer than the distribution's from the Go module proxy,
# for the long tests. It prints their directories, to be put first in PATH.
#
# usage: newer.sh [NAME...]
#
#   dockerd-28   dockerd, docker-proxy
#   dockerd-29   dockerd, docker-proxy
#   containerd-2 containerd, containerd-shim-runc-v2, ctr
#   runc         runc
#   docker-cli   docker
#   compose-2    docker-compose
#   compose      docker-compose
#   buildx       docker-buildx
#
# No NAME means dockerd-29, containerd-2 and runc. The programs go to $BERM_ENGINES/NAME/bin,
# ~/.cache/berm-engines if not set. What is there in these versions isn't built again. It needs
# Go, gcc, libc6-dev, and for runc pkg-config and libseccomp-dev. Each takes 1 to 15 minutes on
# 2 cores; all leave 6 GB in Go's caches.
set -eu

DOCKERD_28=v28.5.2+incompatible
DOCKERD_29=v2.0.0-beta.24 # of moby/v2: the proxy has its betas only
CONTAINERD_2=v2.4.2
RUNC=v1.5.2
DOCKER_CLI=v29.9.1+incompatible # 29.9.3 needs a module that the proxy lacks
COMPOSE_2=v2.40.3
COMPOSE=v5.6.0
BUILDX=v0.38.2

# fetch MODULE VERSION: a writable copy of its sources, in $src. Modules from before Go's keep
# go.mod under another name, and the proxy's archives lack packages of vendor directories.
fetch() {
	version=$2
	src=$work/src
	cp -R "$(cd "$work" && GOWORK=off go mod download -json "$1@$2" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')" "$src"
	chmod -R u+w "$src"
	if [ ! -e "$src/go.mod" ]; then
		mv "$src/vendor.mod" "$src/go.mod"
		mv "$src/vendor.sum" "$src/go.sum"
	fi
	rm -rf "$src/vendor"
}

# build PROGRAM PACKAGE CGO TAGS LDFLAGS
build() {
	echo "building $1 $version" >&2
	(cd "$src" && GOWORK=off CGO_ENABLED=$3 go build -buildvcs=false -trimpath -tags "$4" -ldflags "-s -w $5" -o "$work/new/bin/$1" "$2") >&2
}

# dockerd MODULE TAGS RELEASE: with C, or it has no project quotas.
dockerd() {
	for program in dockerd docker-proxy; do
		build $program ./cmd/$program 1 "netgo osusergo $2" "-X $1/dockerversion.Version=$3"
	done
}

# compile NAME: its programs, in $work/new/bin.
compile() {
	case $1 in
	dockerd-28)
		fetch github.com/docker/docker $DOCKERD_28
		number=${DOCKERD_28%+*}
		dockerd github.com/docker/docker '' "${number#v}"
		;;
	dockerd-29)
		fetch github.com/moby/moby/v2 $DOCKERD_29
		dockerd github.com/moby/moby/v2 nri_no_wasm "$(sed -n 's/^ *next: "\(.*\)"$/\1/p' "$src/releases/versions.yaml")"
		;;
	containerd-2)
		fetch github.com/containerd/containerd/v2 $CONTAINERD_2
		for program in containerd ctr containerd-shim-runc-v2; do
			build $program ./cmd/$program 0 'urfave_cli_no_docs static_build' "-X github.com/containerd/containerd/v2/version.Version=$CONTAINERD_2"
		done
		;;
	runc)
		fetch github.com/opencontainers/runc $RUNC
		build runc . 1 seccomp ''
		;;
	docker-cli)
		fetch github.com/docker/cli $DOCKER_CLI
		number=${DOCKER_CLI%+*}
		build docker ./cmd/docker 0 'grpcnotrace osusergo netgo' "-X github.com/docker/cli/cli/version.Version=${number#v}"
		;;
	compose-2)
		fetch github.com/docker/compose/v2 $COMPOSE_2
		build docker-compose ./cmd 0 '' "-X github.com/docker/compose/v2/internal.Version=$COMPOSE_2"
		;;
	compose)
		fetch github.com/docker/compose/v5 $COMPOSE
		build docker-compose ./cmd 0 '' "-X github.com/docker/compose/v5/internal.Version=$COMPOSE"
		;;
	buildx)
		fetch github.com/docker/buildx $BUILDX
		build docker-buildx ./cmd/buildx 0 '' "-X github.com/docker/buildx/version.Version=$BUILDX"
		;;
	esac
}

# pinned NAME: its version.
pinned() {
	case $1 in
	dockerd-28) echo $DOCKERD_28 ;;
	dockerd-29) echo $DOCKERD_29 ;;
	containerd-2) echo $CONTAINERD_2 ;;
	runc) echo $RUNC ;;
	docker-cli) echo $DOCKER_CLI ;;
	compose-2) echo $COMPOSE_2 ;;
	compose) echo $COMPOSE ;;
	buildx) echo $BUILDX ;;
	*)
		echo "newer.sh: nothing is called $1" >&2
		return 1
		;;
	esac
}

[ $# -gt 0 ] || set -- dockerd-29 containerd-2 runc
to=${BERM_ENGINES:-$HOME/.cache/berm-engines}
mkdir -p "$to"
work=
trap 'rm -rf "$work"' EXIT
path=
for name; do
	wanted=$(pinned "$name")
	if [ "$(cat "$to/$name/version" 2>/dev/null)" != "$wanted" ]; then
		work=$(mktemp -d "$to/build.XXXXXX")
		mkdir -p "$work/new/bin"
		compile "$name"
		echo "$wanted" >"$work/new/version"
		rm -rf "${to:?}/$name"
		mv "$work/new" "$to/$name"
		rm -rf "$work"
	fi
	path=$path:$to/$name/bin
done
echo "${path#:}"
