# Runs the cases against the engine at DOCKER_HOST, with the reaper and without.
set -- testcontainers/ryuk:0.14.0
. "$SRC/../ryuk.sh"
export NODE_PATH="$CACHE/node_modules" TESTCONTAINERS_RYUK_RECONNECTION_TIMEOUT=1s
TESTCONTAINERS_RYUK_DISABLED=true node "$SRC/cases.js" || true
node "$SRC/ryuk.js"
