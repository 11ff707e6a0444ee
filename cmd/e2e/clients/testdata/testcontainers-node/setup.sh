# Installs Testcontainers for Node.js into CACHE, and builds the reaper.
if ! [ -e installed ]; then
	npm install --prefix "$CACHE" --no-fund --no-audit --silent testcontainers@11.14.0 tar-stream@3.1.7
	touch installed
fi
cd "$SRC/../testcontainers-go"
CGO_ENABLED=0 GOWORK=off go build -o "$CACHE/ryuk/ryuk" ./ryuk
