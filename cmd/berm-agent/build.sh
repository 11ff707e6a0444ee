#!/usr/bin/env bash
# Builds the agent's program: build.sh FILE. The same bytes come from the same sources,
# wherever they lie: hosts keep it by its hash.
#
# Go's garbage collector keeps four lists of spans for every size of object, each made for
# heaps of a gigabyte and more, and marks by 64 KiB: once it has run, that is a megabyte in
# every sandbox, for a heap of 200 KiB. No setting makes them smaller, so three constants of
# Go's runtime are smaller here, and the lists grow as they would anyway. Where another
# version of Go doesn't have them, the program is built without, and is larger.
set -euo pipefail
go=${GO:-go}
out=$(realpath -m "$1")
cd "$(dirname "$0")"

sources=$("$go" env GOROOT)/src/runtime
overlay=$(mktemp -d)
trap 'rm -rf "$overlay"' EXIT
sed -E 's/^(\tspanSetBlockEntries =) 512/\1 32/; s/^(\tspanSetInitSpineCap =) 256/\1 16/' "$sources/mspanset.go" >"$overlay/mspanset.go"
sed -E 's/^(const gcBitsChunkBytes = uintptr)\(64 << 10\)/\1(8 << 10)/' "$sources/mheap.go" >"$overlay/mheap.go"
printf '{"Replace": {"%s": "%s", "%s": "%s"}}' "$sources/mspanset.go" "$overlay/mspanset.go" \
	"$sources/mheap.go" "$overlay/mheap.go" >"$overlay/overlay.json"

CGO_ENABLED=0 "$go" build -overlay "$overlay/overlay.json" -trimpath -buildvcs=false -ldflags '-s -w' -o "$out" .
