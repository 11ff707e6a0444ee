#!/usr/bin/env bash
# Builds the agent's program: build.sh FILE. The same bytes come from the same sources,
# wherever they lie: hosts keep it by its hash.
#
# Go's garbage collector keeps four lists of spans for every size of object, each made for
# heaps of a gigabyte and more, and marks by 64 KiB, and a processor the stacks of up to 64
# goroutines that have ended: once all that is there, it is a megabyte in every sandbox, for a
# heap of 200 KiB. No setting makes it less, so a few constants of Go's runtime are smaller
# here; what they bound grows or moves on as it would anyway. Where another version of Go
# doesn't have them, the program is built without, and takes more.
set -euo pipefail
go=${GO:-go}
out=$(realpath -m "${1:?a file to write is needed}")

sources=$($go env GOROOT)/src/runtime
overlay=$(mktemp -d)
trap 'rm -rf "$overlay"' EXIT
replace=
small() { # FILE, what sed is to do with it
	sed -E "$2" "$sources/$1" >"$overlay/$1"
	! cmp -s "$sources/$1" "$overlay/$1" || echo "build.sh: this Go's runtime/$1 has other constants: the agent will take more memory" >&2
	replace+="${replace:+, }\"$sources/$1\": \"$overlay/$1\""
}
small mspanset.go 's/^(\tspanSetBlockEntries =) 512/\1 32/; s/^(\tspanSetInitSpineCap =) 256/\1 16/'
small mheap.go 's/^(const gcBitsChunkBytes = uintptr)\(64 << 10\)/\1(8 << 10)/'
small proc.go 's/^(\tif pp.gFree.size >=) 64/\1 8/; s/^(\t\tfor pp.gFree.size (>=|<)) 32/\1 4/'
echo "{\"Replace\": {$replace}}" >"$overlay/overlay.json"

CGO_ENABLED=0 $go build -C "$(dirname "$0")" -overlay "$overlay/overlay.json" -trimpath -buildvcs=false -ldflags '-s -w' -o "$out" .
