# Compose: up, down, and what a project goes through between them.

### up -d
web </dev/null
docker-compose up -d
same "$(of web '{{.State.Running}} {{index .Config.Labels "com.docker.compose.project"}}')" "true $CASE"
### up in the foreground ends with its services
echo 'services: {web: {image: busybox, command: echo said}}' >compose.yaml
has "$(docker-compose up)" said
### up --abort-on-container-exit
web <<END
  other:
    image: busybox
    command: "true"
END
docker-compose up --abort-on-container-exit
same "$(docker ps -q)" ""
### up --exit-code-from
web <<END
  other:
    image: busybox
    command: sh -c 'exit 3'
END
docker-compose up --exit-code-from other || same $? 3
### up --wait
web <<END
    healthcheck: {test: "true", interval: 1s}
END
docker-compose up --wait
same "$(of web '{{.State.Health.Status}}')" healthy
### up --no-start
web </dev/null
docker-compose up --no-start
same "$(docker ps -a --format '{{.State}}')" created
### up again doesn't recreate
web <<END
    environment: {A: b}
    ports: ["80"]
    volumes: [data:/data, /cache, .:/src]
    networks: {default: {aliases: [other]}}
    labels: {a: b}
volumes: {data: {}}
END
docker-compose up -d
before=$(docker-compose ps -q)
docker-compose up -d
same "$(docker-compose ps -q)" "$before"
### up again with a changed variable recreates
web <<END
    environment: {A: b}
END
docker-compose up -d
before=$(docker-compose ps -q)
sed -i s/b}/c}/ compose.yaml
docker-compose up -d
test "$(docker-compose ps -q)" != "$before"
has "$(of web '{{.Config.Env}}')" A=c
same "$(docker ps -aq | wc -l)" 1
### up again with a newer image recreates
web </dev/null
docker tag busybox mine:1
sed -i s/busybox/mine:1/ compose.yaml
docker-compose up -d
before=$(docker-compose ps -q)
docker commit -c 'LABEL new=yes' "$before" mine:1
docker-compose up -d
same "$(of web '{{index .Config.Labels "new"}}')" yes
### up again starts what has stopped
web </dev/null
docker-compose up -d
before=$(docker-compose ps -q)
docker-compose stop
docker-compose up -d
same "$(docker-compose ps -q)" "$before"
### up --force-recreate
web </dev/null
docker-compose up -d
before=$(docker-compose ps -q)
docker-compose up -d --force-recreate
test "$(docker-compose ps -q)" != "$before"
### up --no-recreate
web <<END
    environment: {A: b}
END
docker-compose up -d
before=$(docker-compose ps -q)
sed -i s/b}/c}/ compose.yaml
docker-compose up -d --no-recreate
same "$(docker-compose ps -q)" "$before"
### up keeps anonymous volumes
web <<END
    volumes: [/data]
END
docker-compose up -d
docker-compose exec -T web touch /data/x
docker-compose up -d --force-recreate
docker-compose exec -T web test -e /data/x
same "$(docker volume ls -q | wc -l)" 1
### up -V
web <<END
    volumes: [/data]
END
docker-compose up -d
docker-compose exec -T web touch /data/x
docker-compose up -d --force-recreate -V
docker-compose exec -T web sh -c '! test -e /data/x'
### up --remove-orphans
web </dev/null
docker-compose up -d
sed -i s/web:/other:/ compose.yaml
docker-compose up -d --remove-orphans
same "$(docker ps -aq | wc -l)" 1
### up --scale
web </dev/null
docker-compose up -d --scale web=3
same "$(docker-compose ps -q | wc -l)" 3
### up --no-deps
web <<END
    depends_on: [db]
  db:
    image: busybox
    command: sleep 1000
END
docker-compose up -d --no-deps web
same "$(docker ps -q | wc -l)" 1
### up pulls what is missing
echo "services: {web: {image: '$REGISTRY/hello:1', command: sleep 1000}}" >compose.yaml
docker-compose up -d
same "$(of web '{{.Config.Image}}')" "$REGISTRY/hello:1"
### up --pull always
echo "services: {web: {image: '$REGISTRY/hello:1', command: sleep 1000}}" >compose.yaml
docker-compose up -d --pull always
### up --attach
web <<END
  other:
    image: busybox
    command: echo said
END
has "$(docker-compose up --attach other --abort-on-container-exit)" said
### up with a port that is in use
up one -p 18080:80
web <<END
    ports: ["18080:80"]
END
fails docker-compose up -d | grep -E 'already (in use|allocated)'
### down
web </dev/null
docker-compose up -d
docker-compose down
same "$(docker ps -aq)" ""
lacks "$(docker network ls)" "$CASE"
### down keeps volumes
web <<END
    volumes: [data:/data]
volumes: {data: {}}
END
docker-compose up -d
docker-compose down
same "$(docker volume ls -q)" "${CASE}_data"
### down -v
web <<END
    volumes: [data:/data, /cache]
volumes: {data: {}}
END
docker-compose up -d
docker-compose down -v
same "$(docker volume ls -q)" ""
### down -v keeps external volumes
docker volume create kept
web <<END
    volumes: [kept:/data]
volumes: {kept: {external: true}}
END
docker-compose up -d
docker-compose down -v
same "$(docker volume ls -q)" kept
### down --rmi all
echo "services: {web: {image: '$REGISTRY/hello:1', command: sleep 1000, stop_signal: KILL}}" >compose.yaml
docker-compose up -d
docker-compose down --rmi all
same "$(docker images -q $REGISTRY/hello)" ""
### down --rmi local [buildkit]
printf 'FROM busybox\nCMD ["sleep", "1000"]\n' >Dockerfile
echo 'services: {web: {build: ., stop_signal: KILL}}' >compose.yaml
docker-compose up -d
docker-compose down --rmi local
lacks "$(docker images)" "$CASE"
### down --remove-orphans
web <<END
  other:
    image: busybox
    command: sleep 1000
    stop_signal: KILL
END
docker-compose up -d
web </dev/null
docker-compose down --remove-orphans
same "$(docker ps -aq)" ""
### create
web </dev/null
docker-compose create
same "$(docker ps -a --format '{{.State}}')" created
### start
web </dev/null
docker-compose up --no-start
docker-compose start
same "$(of web '{{.State.Running}}')" true
### stop
web </dev/null
docker-compose up -d
docker-compose stop
same "$(docker ps -a --format '{{.State}}')" exited
### stop -t
web </dev/null
sed -i /stop_signal/d compose.yaml
docker-compose up -d
docker-compose stop -t 1
same "$(docker ps -q)" ""
### restart
web </dev/null
docker-compose up -d
before=$(of web '{{.State.StartedAt}}')
docker-compose restart
test "$(of web '{{.State.StartedAt}}')" != "$before"
### kill
web </dev/null
docker-compose up -d
docker-compose kill
eventually sh -c 'test -z "$(docker ps -q)"' # an engine wakes who waits for the end before its list has it
### kill -s
echo "services: {web: {image: busybox, command: sh -c 'trap \"echo caught; exit\" USR1; echo ready; while :; do sleep 0.1; done'}}" >compose.yaml
docker-compose up -d
eventually sh -c 'docker-compose logs | grep ready'
docker-compose kill -s SIGUSR1 web
eventually sh -c 'docker-compose logs | grep caught'
### rm -f
web </dev/null
docker-compose up -d
docker-compose stop
docker-compose rm -f
same "$(docker ps -aq)" ""
### rm -fsv
web <<END
    volumes: [/data, kept:/kept]
volumes: {kept: {}}
END
docker-compose up -d
docker-compose rm -fsv
same "$(docker volume ls -q)" "${CASE}_kept"
### pause and unpause
web </dev/null
docker-compose up -d
docker-compose pause
same "$(of web '{{.State.Status}}')" paused
docker-compose unpause web
same "$(of web '{{.State.Status}}')" running
### scale
web </dev/null
docker-compose scale web=2
same "$(docker ps -q | wc -l)" 2
docker-compose scale web=1
same "$(docker ps -aq | wc -l)" 1
### wait
web <<END
  other:
    image: busybox
    command: sh -c 'sleep 1; exit 5'
END
docker-compose up -d
docker-compose wait other || same $? 5
### two projects beside each other
web </dev/null
docker-compose -p one up -d
docker-compose -p two up -d
docker-compose -p one down
same "$(docker ps -q | wc -l)" 1
same "$(docker-compose -p two ps -q | wc -l)" 1
### a project of hex letters
web <<END
    volumes: [data:/data]
volumes: {data: {}}
END
docker-compose -p cafe up -d
docker-compose -p cafe up -d
docker-compose -p cafe exec -T web touch /data/x
docker-compose -p cafe down -v
same "$(docker ps -aq)" ""
### a project and services of hex letters
echo 'services: {dead: {image: busybox, command: sleep 1000, stop_signal: KILL}, beef: {image: busybox, command: sleep 1000, stop_signal: KILL}}' >compose.yaml
docker-compose -p abcdef012345 up -d
docker-compose -p abcdef012345 restart dead
docker-compose -p abcdef012345 rm -fs beef
same "$(docker-compose -p abcdef012345 ps -q | wc -l)" 1
