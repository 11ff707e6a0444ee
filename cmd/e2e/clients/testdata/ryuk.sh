# Builds the reaper's image under a name, and offers Docker's client Compose 2.
mkdir -p ryuk "$DOCKER_CONFIG/cli-plugins"
cp "$CACHE/ryuk/ryuk" ryuk/
printf 'FROM scratch\nCOPY ryuk /ryuk\nCMD ["/ryuk"]\nLABEL org.testcontainers.ryuk=true\n' >ryuk/Dockerfile
docker build -q -t "$1" ryuk >&2
if [ -e "$CACHE/../../compose-2/bin/docker-compose" ]; then
	ln -sf "$CACHE/../../compose-2/bin/docker-compose" "$DOCKER_CONFIG/cli-plugins/docker-compose"
fi
