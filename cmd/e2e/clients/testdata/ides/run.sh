# Runs the cases against the engine at DOCKER_HOST.
export HELLO="$REGISTRY/hello"
. "$SRC/../registry.sh"
PYTHONPATH=$SRC/.. /usr/bin/python3 -B "$SRC/cases.py"
