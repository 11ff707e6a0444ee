# Runs the cases against the engine at DOCKER_HOST.
. "$SRC/../registry.sh"
NODE_PATH=$CACHE/node_modules node "$SRC/cases.js"
