# Starts a registry that ends with the shell. Sets REGISTRY to its address.
/usr/bin/python3 -B "$SRC/../registry.py" 5000 >registry &
registry=$!
trap 'kill $registry' EXIT
while ! [ -s registry ]; do sleep 0.1; done
REGISTRY=$(cat registry)
export REGISTRY
