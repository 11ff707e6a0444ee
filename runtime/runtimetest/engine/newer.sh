#!/bin/sh
# Builds the newest Docker Engine, containerd and runc that the Go module proxy has, for the
# long tests. It prints the directory of the programs, to be put first in PATH.
#
# usage: newer.sh
#
# The programs go to $BERM_NEWER, ~/.cache/berm-newer if not set. What is there in these
# versions isn't built again. It needs Go, gcc, libc6-dev, pkg-config and libseccomp-dev, takes
# some 10 minutes on 2 cores, and leaves 5 GB in Go's caches.
set -eu

MOBY=v2.0.0-beta.24 # Docker Engine 29: the proxy has its betas only
CONTAINERD=v2.4.2
RUNC=v1.5.2

to=${BERM_NEWER:-$HOME/.cache/berm-newer}
mkdir -p "$to"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fetch MODULE VERSION: a writable copy of its sources, in $src.
fetch() {
	src=$work/src
	rm -rf "$src"
	cp -R "$(cd "$work" && GOWORK=off go mod download -json "$1@$2" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')" "$src"
	chmod -R u+w "$src"
	rm -rf "$src/vendor" # the proxy's archive lacks packages of it
}

# build NAME PACKAGE CGO TAGS LDFLAGS
build() {
	echo "building $1" >&2
	(cd "$src" && GOWORK=off CGO_ENABLED=$3 go build -buildvcs=false -trimpath -tags "$4" -ldflags "-s -w $5" -o "$to/$1" "$2") >&2
}

if [ "$(cat "$to/version" 2>/dev/null)" != "$MOBY $CONTAINERD $RUNC" ]; then
	fetch github.com/opencontainers/runc $RUNC
	build runc . 1 seccomp ''
	fetch github.com/containerd/containerd/v2 $CONTAINERD
	for name in containerd ctr containerd-shim-runc-v2; do
		build $name ./cmd/$name 0 'urfave_cli_no_docs static_build' "-X github.com/containerd/containerd/v2/version.Version=$CONTAINERD"
	done
	fetch github.com/moby/moby/v2 $MOBY
	release=$(sed -n 's/^ *next: "\(.*\)"$/\1/p' "$src/releases/versions.yaml")
	for name in dockerd docker-proxy; do
		build $name ./cmd/$name 1 'netgo osusergo nri_no_wasm' "-X github.com/moby/moby/v2/dockerversion.Version=$release"
	done
	echo "$MOBY $CONTAINERD $RUNC" >"$to/version"
fi
echo "$to"
