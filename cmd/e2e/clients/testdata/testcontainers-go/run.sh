# Runs the cases against the engine at DOCKER_HOST, without the reaper and with it.
set -- testcontainers/ryuk:0.14.0
. "$SRC/../ryuk.sh"
export TESTCONTAINERS_RYUK_RECONNECTION_TIMEOUT=5s # on a busy machine the first connection comes late
TESTCONTAINERS_RYUK_DISABLED=true "$CACHE/cases" || true
"$CACHE/cases" ryuk
