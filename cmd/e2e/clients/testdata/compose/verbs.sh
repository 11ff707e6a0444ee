# Compose: commands inside containers, builds, images, and what is shown.

### ps
web </dev/null
docker-compose up -d
has "$(docker-compose ps)" web "sleep 1000" Up
### ps -a
echo 'services: {web: {image: busybox, command: "true"}}' >compose.yaml
docker-compose up -d
eventually sh -c 'docker-compose ps -a | grep -i "exit"'
### ps --services --filter
web </dev/null
docker-compose up -d
same "$(docker-compose ps --services --filter status=running)" web
### ps --format with a template
web </dev/null
docker-compose up -d
same "$(docker-compose ps --format '{{.Service}} {{.Image}} {{.State}}')" "web busybox running"
### logs
echo 'services: {web: {image: busybox, command: echo said}}' >compose.yaml
docker-compose up -d
eventually sh -c 'docker-compose logs web | grep said'
### logs -f ends with the services
echo 'services: {web: {image: busybox, command: sh -c "echo said; sleep 1; echo more"}}' >compose.yaml
docker-compose up -d
has "$(docker-compose logs -f)" said more
### logs --tail
echo 'services: {web: {image: busybox, command: seq 1 5}}' >compose.yaml
docker-compose up
same "$(docker-compose logs --tail 2 | grep -c '[45]$')" 2
same "$(docker-compose logs --tail 2 | grep -c ' [1-3]$')" 0
### logs -t
echo 'services: {web: {image: busybox, command: echo said}}' >compose.yaml
docker-compose up
docker-compose logs -t | grep '20..-..-..T.*said'
### logs --since and --until
echo 'services: {web: {image: busybox, command: echo said}}' >compose.yaml
docker-compose up
has "$(docker-compose logs --since 1h --until 1m)" ""
has "$(docker-compose logs --since 1h)" said
### exec -T
web </dev/null
docker-compose up -d
same "$(docker-compose exec -T web echo hello)" hello
### exec -T with input
web </dev/null
docker-compose up -d
same "$(echo typed | docker-compose exec -T web cat)" typed
### exec with an exit code
web </dev/null
docker-compose up -d
docker-compose exec -T web sh -c 'exit 7' || same $? 7
### exec -e, -u and -w
web </dev/null
docker-compose up -d
same "$(docker-compose exec -T -e A=b -u 1000 -w /tmp web sh -c 'echo $A $(id -u) $PWD')" "b 1000 /tmp"
### exec -d
web </dev/null
docker-compose up -d
docker-compose exec -d web touch /x
eventually docker-compose exec -T web test -e /x
### exec on a terminal
web </dev/null
docker-compose up -d
has "$(script -qec "docker-compose exec web sh -c 'test -t 0 && echo terminal'" /dev/null)" terminal
### run --rm
web </dev/null
same "$(docker-compose run --rm web echo hello)" hello
same "$(docker ps -aq)" ""
### run -T with input
web </dev/null
same "$(echo typed | docker-compose run --rm -T web cat)" typed
### run with an exit code
web </dev/null
docker-compose run --rm web sh -c 'exit 7' || same $? 7
### run on a terminal
web </dev/null
has "$(script -qec "docker-compose run --rm web sh -c 'test -t 0 && echo terminal'" /dev/null)" terminal
### run -e
web </dev/null
same "$(docker-compose run --rm -e A=b web sh -c 'echo $A')" b
### run -v
web </dev/null
echo text >file
same "$(docker-compose run --rm -v "$PWD:/data" web cat /data/file)" text
### run --name
web </dev/null
docker-compose run -d --name mine web
same "$(field mine '{{index .Config.Labels "com.docker.compose.oneoff"}}')" True
### run starts what the service needs
web <<END
    depends_on: [db]
  db:
    image: busybox
    command: sleep 1000
END
docker-compose run --rm web nslookup db 127.0.0.11
same "$(docker ps -q | wc -l)" 1
### run --no-deps
web <<END
    depends_on: [db]
  db:
    image: busybox
    command: sleep 1000
END
docker-compose run --rm --no-deps web true
same "$(docker ps -q | wc -l)" 0
### run --service-ports
web <<END
    ports: ["18080:80"]
END
docker-compose run -d --name mine --service-ports web
has "$(docker port mine)" 0.0.0.0:18080
### run -p
web </dev/null
docker-compose run -d --name mine -p 18081:81 web
has "$(docker port mine)" 0.0.0.0:18081
### build [buildkit]
printf 'FROM busybox\nRUN echo text >/file\n' >Dockerfile
echo 'services: {web: {build: ., image: "mine:1"}}' >compose.yaml
docker-compose build
same "$(docker run --rm mine:1 cat /file)" text
### build --no-cache [buildkit]
printf 'FROM busybox\nRUN date +%%N >/file\n' >Dockerfile
echo 'services: {web: {build: ., image: "mine:1"}}' >compose.yaml
docker-compose build
before=$(docker images -q mine:1)
docker-compose build --no-cache
test "$(docker images -q mine:1)" != "$before"
### build --build-arg [buildkit]
printf 'FROM busybox\nARG A=none\nRUN echo $A >/file\n' >Dockerfile
echo 'services: {web: {build: ., image: "mine:1"}}' >compose.yaml
docker-compose build --build-arg A=b
same "$(docker run --rm mine:1 cat /file)" b
### build with arguments, labels, a target and a Dockerfile [buildkit]
mkdir app
printf 'FROM busybox AS one\nARG A\nRUN echo $A >/file\nFROM one AS two\nRUN rm /file\n' >app/Other
cat >compose.yaml <<END
services:
  web:
    image: mine:1
    build: {context: app, dockerfile: Other, target: one, args: {A: b}, labels: {c: d}}
END
docker-compose build
same "$(docker run --rm mine:1 cat /file)" b
same "$(docker image inspect -f '{{.Config.Labels.c}}' mine:1)" d
### build with copied files and .dockerignore [buildkit]
printf 'FROM busybox\nCOPY . /app\n' >Dockerfile
echo no >.dockerignore
echo text | tee yes >no
echo 'services: {web: {build: ., image: "mine:1"}}' >compose.yaml
docker-compose build
same "$(docker run --rm mine:1 cat /app/yes)" text
docker run --rm mine:1 sh -c '! test -e /app/no'
### build with cache_from [buildkit]
printf 'FROM busybox\nRUN true\n' >Dockerfile
echo 'services: {web: {build: {context: ., cache_from: [busybox]}, image: "mine:1"}}' >compose.yaml
docker-compose build
### build without a network [buildkit]
printf 'FROM busybox\nRUN ! ping -c1 192.0.2.1\n' >Dockerfile
echo 'services: {web: {build: {context: ., network: none}, image: "mine:1"}}' >compose.yaml
docker-compose build
### build with shm_size [buildkit]
printf 'FROM busybox\nRUN df -m /dev/shm | grep -q " 32 "\n' >Dockerfile
echo 'services: {web: {build: {context: ., shm_size: 32m}, image: "mine:1"}}' >compose.yaml
docker-compose build
### build with tags [buildkit]
printf 'FROM busybox\nRUN true\n' >Dockerfile
echo 'services: {web: {build: {context: ., tags: ["mine:2"]}, image: "mine:1"}}' >compose.yaml
docker-compose build
docker image inspect mine:2
### build with secrets [buildkit]
printf 'FROM busybox\nRUN --mount=type=secret,id=key test "$(cat /run/secrets/key)" = text\n' >Dockerfile
printf text >key
cat >compose.yaml <<END
services: {web: {build: {context: ., secrets: [key]}, image: "mine:1"}}
secrets: {key: {file: key}}
END
DOCKER_BUILDKIT=1 docker-compose build
### build of many services at once [buildkit]
echo services: >compose.yaml
for s in 1 2 3 4 5 6 7 8 9 10 11 12; do
    printf 'FROM busybox\nRUN sleep 2; echo %s >/file\n' $s >$s
    echo "  s$s: {image: \"s$s:1\", build: {context: ., dockerfile: \"$s\"}}" >>compose.yaml
done
docker-compose build
for s in 1 12; do same "$(docker run --rm s$s:1 cat /file)" $s; done
### build of one service on another's image [buildkit]
printf 'FROM busybox\nRUN echo base >/d\n' >a
printf 'FROM base\nRUN cp /d /e\n' >b
cat >compose.yaml <<END
services:
  base: {image: "base:1", build: {context: ., dockerfile: a}}
  web: {image: "mine:1", build: {context: ., dockerfile: b, additional_contexts: {base: "service:base"}}}
END
docker-compose build
same "$(docker run --rm mine:1 cat /e)" base
### build of a Dockerfile in the file [buildkit]
cat >compose.yaml <<END
services:
  web:
    image: mine:1
    build:
      dockerfile_inline: |
        FROM busybox
        RUN echo text >/file
END
docker-compose build
same "$(docker run --rm mine:1 cat /file)" text
### build with a context of another directory [buildkit]
mkdir app lib
echo text >lib/file
printf 'FROM busybox\nCOPY --from=lib file /file\n' >app/Dockerfile
cat >compose.yaml <<END
services:
  web: {image: "mine:1", build: {context: app, additional_contexts: {lib: ./lib}}}
END
docker-compose build
same "$(docker run --rm mine:1 cat /file)" text
### build that fails [buildkit]
printf 'FROM busybox\nRUN exit 9\n' >Dockerfile
echo 'services: {web: {build: .}}' >compose.yaml
fails docker-compose build | grep -E 'code:? 9'
### up builds what is missing [buildkit]
printf 'FROM busybox\nCMD ["sleep", "1000"]\n' >Dockerfile
echo 'services: {web: {build: ., stop_signal: KILL}}' >compose.yaml
docker-compose up -d
has "$(of web '{{.Config.Image}}')" web
### up --build [buildkit]
printf 'FROM busybox\nCMD ["sleep", "1000"]\n' >Dockerfile
echo 'services: {web: {build: ., stop_signal: KILL}}' >compose.yaml
docker-compose up -d
echo RUN touch /x >>Dockerfile
docker-compose up -d --build
docker-compose exec -T web test -e /x
### pull
echo "services: {web: {image: '$REGISTRY/hello:1'}}" >compose.yaml
docker-compose pull
docker image inspect "$REGISTRY/hello:1"
### pull --ignore-pull-failures
echo "services: {web: {image: '$REGISTRY/hello:1'}, other: {image: '$REGISTRY/nosuch:1'}}" >compose.yaml
docker-compose pull --ignore-pull-failures
docker image inspect "$REGISTRY/hello:1"
### pull after a login
echo password | docker login -u user --password-stdin "$LOGIN"
docker tag "$IMAGE" "$LOGIN/mine/new:1"
docker push "$LOGIN/mine/new:1"
docker rmi "$LOGIN/mine/new:1"
echo "services: {web: {image: '$LOGIN/mine/new:1'}}" >compose.yaml
docker-compose pull
### push
docker tag "$IMAGE" "$REGISTRY/mine/new:1"
echo "services: {web: {image: '$REGISTRY/mine/new:1', build: .}}" >compose.yaml
docker-compose push
docker rmi "$REGISTRY/mine/new:1"
docker pull "$REGISTRY/mine/new:1"
### config
web <<END
    environment: {A: "\$CASE"}
END
has "$(docker-compose config)" "A: $CASE"
### config --services
web </dev/null
same "$(docker-compose config --services)" web
### config --resolve-image-digests
echo "services: {web: {image: '$REGISTRY/hello:1'}}" >compose.yaml
docker-compose pull
has "$(docker-compose config --resolve-image-digests)" sha256:
### port
web <<END
    ports: ["18080:80"]
END
docker-compose up -d
same "$(docker-compose port web 80)" 0.0.0.0:18080
### top
web </dev/null
docker-compose up -d
has "$(docker-compose top)" "sleep 1000"
### images
web </dev/null
docker-compose up -d
has "$(docker-compose images)" busybox latest
### events
web </dev/null
docker-compose up -d
docker-compose events >log &
events=$!
trap 'kill $events' EXIT
eventually sh -c 'docker-compose restart; grep "container start" log'
### events --json of one service
web </dev/null
docker-compose up -d
docker-compose events --json web >log &
events=$!
trap 'kill $events' EXIT
eventually sh -c 'docker-compose kill -s WINCH; grep "\"action\": *\"kill\"" log'
### cp from a service
web </dev/null
docker-compose up -d
docker-compose exec -T web sh -c 'echo text >/file'
docker-compose cp web:/file .
same "$(cat file)" text
### cp to a service
web </dev/null
docker-compose up -d
echo text >file
docker-compose cp file web:/file
same "$(docker-compose exec -T web cat /file)" text
### ls
web </dev/null
docker-compose up -d
has "$(docker-compose ls)" "$CASE" "running(1)"
### attach
echo 'services: {web: {image: busybox, command: sh -c "while :; do echo said; sleep 0.2; done"}}' >compose.yaml
docker-compose up -d
(timeout -s KILL 3 docker-compose attach --no-stdin --sig-proxy=false web || true) >log
grep said log
### stats --no-stream
web </dev/null
docker-compose up -d
has "$(docker-compose stats --no-stream)" "$CASE"
### volumes -q
web <<END
    volumes: [data:/data]
volumes: {data: {}}
END
docker-compose up -d
same "$(docker-compose volumes -q)" "${CASE}_data"
### export
web </dev/null
docker-compose up -d
docker-compose export -o out.tar web
tar -tf out.tar | grep -x etc/passwd
### commit
web </dev/null
docker-compose up -d
docker-compose exec -T web touch /x
docker-compose commit web mine:1
docker run --rm mine:1 test -e /x
### docker's own commands with a project's objects
web <<END
    volumes: [data:/data]
volumes: {data: {}}
END
docker-compose up -d
same "$(docker ps -q --filter "label=com.docker.compose.project=$CASE" --filter label=com.docker.compose.service=web | wc -l)" 1
same "$(docker volume ls -q --filter "label=com.docker.compose.project=$CASE")" "${CASE}_data"
same "$(docker network ls --filter "label=com.docker.compose.project=$CASE" --format '{{.Name}}')" "${CASE}_default"
