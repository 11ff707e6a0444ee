# Runs the cases against the engine at DOCKER_HOST.
. "$SRC/../registry.sh"
WORK=$PWD PYTHONPATH=$SRC/.. /usr/bin/python3 -B "$SRC/cases.py"
