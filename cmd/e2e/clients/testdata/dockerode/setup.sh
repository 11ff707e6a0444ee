# Installs dockerode into CACHE.
[ -e installed ] && exit
npm install --prefix "$CACHE" --no-fund --no-audit --silent dockerode@5.0.1 tar-stream@3.1.7
touch installed
