# Installs the Docker SDK for Python.
/usr/bin/python3 -c 'import docker' 2>/dev/null && exit
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-docker
