# Builds the cases and the reaper into CACHE.
export CGO_ENABLED=0 GOWORK=off
go -C "$SRC" build -o "$CACHE/ryuk/ryuk" ./ryuk
go -C "$SRC" build -o "$CACHE/cases" .
