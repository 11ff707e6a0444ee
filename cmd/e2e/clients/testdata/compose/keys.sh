# Compose: keys of services.

### entrypoint
echo 'services: {web: {image: busybox, entrypoint: [echo, one], command: two}}' >compose.yaml
has "$(docker-compose up)" "one two"
### environment as a map
web <<END
    environment: {A: b, C: "d e", EMPTY: ""}
END
docker-compose up -d
same "$(docker-compose exec -T web sh -c 'echo $A $C ${EMPTY-unset}')" "b d e"
### environment with dots and dashes
web <<END
    environment: [discovery.type=single-node, a-b=c]
END
docker-compose up -d
has "$(docker-compose exec -T web env)" discovery.type=single-node a-b=c
### env_file
printf 'A=b\n# no\nC=d\n' >app.env
web <<END
    env_file: app.env
END
docker-compose up -d
same "$(docker-compose exec -T web sh -c 'echo $A$C')" bd
### env_file of several, below environment
printf 'A=b\nC=d\n' >one.env
printf 'A=c\n' >two.env
web <<END
    env_file: [one.env, two.env]
    environment: {C: e}
END
docker-compose up -d
same "$(docker-compose exec -T web sh -c 'echo $A$C')" ce
### working_dir
web <<END
    working_dir: /tmp/deep
END
docker-compose up -d
same "$(docker-compose exec -T web pwd)" /tmp/deep
### user
web <<END
    user: "1000:1001"
END
docker-compose up -d
same "$(docker-compose exec -T web sh -c 'id -u; id -g' | tr '\n' ' ')" "1000 1001 "
### group_add
web <<END
    group_add: ["4242"]
END
docker-compose up -d
has "$(docker-compose exec -T web id -G)" 4242
### hostname and domainname
web <<END
    hostname: box
    domainname: example.org
END
docker-compose up -d
same "$(docker-compose exec -T web hostname -f)" box.example.org
### container_name
web <<END
    container_name: mine
END
docker-compose up -d
same "$(field mine '{{.State.Running}}')" true
### labels
web <<END
    labels: {a: b, c.d: "e=f"}
END
docker-compose up -d
same "$(of web '{{.Config.Labels.a}} {{index .Config.Labels "c.d"}}')" "b e=f"
### label_file
echo a=b >labels
web <<END
    label_file: labels
END
docker-compose up -d
same "$(of web '{{.Config.Labels.a}}')" b
### annotations [policy]
web <<END
    annotations: {a: b}
END
docker-compose up --no-start
### tty and stdin_open
web <<END
    tty: true
    stdin_open: true
END
docker-compose up -d
same "$(of web '{{.Config.Tty}} {{.Config.OpenStdin}}')" "true true"
### init
web <<END
    init: true
END
docker-compose up -d
has "$(docker-compose exec -T web cat /proc/1/cmdline)" init
### stop_signal
echo "services: {web: {image: busybox, stop_signal: USR1, command: sh -c 'trap \"echo caught; exit\" USR1; echo ready; while :; do sleep 0.1; done'}}" >compose.yaml
docker-compose up -d
eventually sh -c 'docker-compose logs | grep ready'
docker-compose stop
has "$(docker-compose logs)" caught
### read_only
web <<END
    read_only: true
    tmpfs: [/run]
END
docker-compose up -d
docker-compose exec -T web sh -c 'touch /run/x && ! touch /x'
### tmpfs
web <<END
    tmpfs: "/data:size=8m,mode=1777,noexec"
END
docker-compose up -d
has "$(docker-compose exec -T web mount)" "size=8192k"
### shm_size
web <<END
    shm_size: 32m
END
docker-compose up -d
has "$(docker-compose exec -T web df -m /dev/shm)" 32
### ulimits
web <<END
    ulimits: {nofile: {soft: 1000, hard: 2000}, nproc: 500, core: 0}
END
docker-compose up -d
same "$(docker-compose exec -T web sh -c 'ulimit -n')" 1000
### sysctls
web <<END
    sysctls: {net.core.somaxconn: 777}
END
docker-compose up -d
same "$(docker-compose exec -T web cat /proc/sys/net/core/somaxconn)" 777
### cap_drop
web <<END
    cap_drop: [ALL]
END
docker-compose up -d
has "$(docker-compose exec -T web grep CapEff /proc/1/status)" 0000000000000000
### cap_drop and cap_add
web <<END
    cap_drop: [ALL]
    cap_add: [CHOWN, NET_BIND_SERVICE]
END
docker-compose up -d
docker-compose exec -T web chown nobody /tmp
### cap_add of SYS_ADMIN [policy]
web <<END
    cap_add: [SYS_ADMIN]
END
docker-compose up --no-start
### privileged [policy]
web <<END
    privileged: true
END
docker-compose up --no-start
### pid of the host [policy]
web <<END
    pid: host
END
docker-compose up --no-start
### network_mode host [policy]
web <<END
    network_mode: host
END
docker-compose up --no-start
### security_opt seccomp:unconfined [policy]
web <<END
    security_opt: [seccomp:unconfined]
END
docker-compose up --no-start
### volumes of the host [policy]
web <<END
    volumes: [/etc:/x]
END
docker-compose up --no-start
### volumes with options of the driver [policy]
web <<END
    volumes: [data:/data]
volumes: {data: {driver: local, driver_opts: {type: none, o: bind, device: /etc}}}
END
docker-compose up --no-start
### security_opt no-new-privileges
web <<END
    security_opt: ["no-new-privileges:true"]
END
docker-compose up -d
docker-compose exec -T web grep 'NoNewPrivs.*1' /proc/1/status
### pids_limit
web <<END
    pids_limit: 50
END
docker-compose up -d
same "$(of web '{{.HostConfig.PidsLimit}}')" 50
### mem_limit, mem_reservation and memswap_limit
web <<END
    mem_limit: 64m
    mem_reservation: 32m
    memswap_limit: 64m
END
docker-compose up -d
same "$(of web '{{.HostConfig.Memory}}')" 67108864
### cpus
web <<END
    cpus: 0.5
END
docker-compose up -d
same "$(of web '{{.HostConfig.NanoCpus}}')" 500000000
### blkio_config
web <<END
    blkio_config: {weight: 300}
END
docker-compose up -d
### deploy.resources.limits
web <<END
    deploy: {resources: {limits: {cpus: "0.5", memory: 64M, pids: 50}}}
END
docker-compose up -d
same "$(of web '{{.HostConfig.NanoCpus}} {{.HostConfig.Memory}}')" "500000000 67108864"
### deploy.replicas
web <<END
    deploy: {replicas: 2}
END
docker-compose up -d
same "$(docker ps -q | wc -l)" 2
### restart on-failure with a count
cat >compose.yaml <<END
services: {web: {image: busybox, container_name: mine, command: "false", restart: "on-failure:2"}}
END
docker-compose up -d
eventually sh -c 'docker inspect -f "{{.RestartCount}}" mine | grep 2'
### logging
web <<END
    logging: {driver: json-file, options: {max-size: 1m, max-file: "3"}}
END
docker-compose up -d
same "$(of web '{{index .HostConfig.LogConfig.Config "max-size"}}')" 1m
### healthcheck
web <<END
    healthcheck: {test: [CMD, "true"], interval: 1s, timeout: 2s, retries: 3, start_period: 1s}
END
docker-compose up -d
eventually sh -c 'docker-compose ps | grep "(healthy)"'
same "$(of web '{{.Config.Healthcheck.Retries}}')" 3
### depends_on service_healthy
web <<END
    depends_on: {db: {condition: service_healthy}}
  db:
    image: busybox
    command: sleep 1000
    healthcheck: {test: "true", interval: 1s}
END
docker-compose up -d
same "$(of db '{{.State.Health.Status}}')" healthy
### depends_on service_healthy that never is
web <<END
    depends_on: {db: {condition: service_healthy}}
  db:
    image: busybox
    command: sleep 1000
    healthcheck: {test: "false", interval: 1s, retries: 1}
END
has "$(fails docker-compose up -d)" unhealthy
### depends_on service_completed_successfully
web <<END
    depends_on: {init: {condition: service_completed_successfully}}
    volumes: [data:/data]
  init:
    image: busybox
    command: touch /data/ready
    volumes: [data:/data]
volumes: {data: {}}
END
docker-compose up -d
docker-compose exec -T web test -e /data/ready
### depends_on with required and restart
web <<END
    depends_on: {db: {condition: service_started, restart: true}, other: {condition: service_started, required: false}}
  other:
    image: busybox
    profiles: [never]
  db:
    image: busybox
    command: sleep 1000
    stop_signal: KILL
END
docker-compose up -d
docker-compose restart db
### ports
web <<END
    ports: ["18080:80", "18081-18082:81-82", "18053:53/udp", "90"]
END
docker-compose up -d
same "$(docker-compose port web 81)" 0.0.0.0:18081
### ports of a range for several
web <<END
    ports: ["18080-18083:80"]
END
docker-compose up -d --scale web=3
same "$(docker ps -q | wc -l)" 3
### ports reach the service
cat >compose.yaml <<END
services: {web: {image: busybox, ports: ["127.0.0.1:18080:80"], command: sh -c 'mkdir /w && echo found >/w/index.html && httpd -f -p 80 -h /w'}}
END
docker-compose up -d
eventually sh -c 'busybox wget -qO- http://127.0.0.1:18080/ | grep found'
### expose
web <<END
    expose: ["80", "91/udp"]
END
docker-compose up -d
has "$(of web '{{json .Config.ExposedPorts}}')" 80/tcp 91/udp
### extra_hosts
web <<END
    extra_hosts: ["name:192.0.2.7"]
END
docker-compose up -d
has "$(docker-compose exec -T web cat /etc/hosts)" 192.0.2.7
### extra_hosts with host-gateway
web <<END
    extra_hosts: {host.docker.internal: host-gateway}
END
docker-compose up -d
docker-compose exec -T web grep host.docker.internal /etc/hosts
### dns, dns_search and dns_opt
web <<END
    dns: [192.0.2.1]
    dns_search: example.org
    dns_opt: [ndots:2]
END
docker-compose up -d
same "$(of web '{{index .HostConfig.Dns 0}}')" 192.0.2.1
has "$(docker-compose exec -T web cat /etc/resolv.conf)" example.org ndots:2
### links
web <<END
    links: ["db:other"]
  db:
    image: busybox
    command: sleep 1000
END
docker-compose up -d
docker-compose exec -T web nslookup other 127.0.0.11
### network_mode none
web <<END
    network_mode: none
END
docker-compose up -d
same "$(docker-compose exec -T web ls /sys/class/net | tr -d '\n')" lo
### network_mode bridge
web <<END
    network_mode: bridge
END
docker-compose up -d
docker-compose exec -T web ip addr show eth0
### network_mode of a service
web <<END
    network_mode: service:db
  db:
    image: busybox
    command: sleep 1000
    hostname: together
END
docker-compose up -d
same "$(docker-compose exec -T web hostname)" together
### pid of a service
web <<END
    pid: service:db
  db:
    image: busybox
    command: sleep 2000
END
docker-compose up -d
has "$(docker-compose exec -T web ps)" "sleep 2000"
### ipc shareable and of a service
web <<END
    ipc: service:db
  db:
    image: busybox
    command: sleep 1000
    ipc: shareable
END
docker-compose up -d
docker-compose exec -T db touch /dev/shm/x
docker-compose exec -T web test -e /dev/shm/x
### pull_policy
cat >compose.yaml <<END
services:
  one: {image: busybox, pull_policy: never}
  two: {image: $REGISTRY/hello:1, pull_policy: always}
  three: {image: busybox, pull_policy: missing}
END
docker-compose up
### post_start
web <<END
    post_start: [{command: touch /x}]
END
docker-compose up -d
docker-compose exec -T web test -e /x
### pre_stop
web <<END
    volumes: [.:/data]
    pre_stop: [{command: touch /data/x}]
END
docker-compose up -d
docker-compose stop
test -e x
### x- extensions and anchors
cat >compose.yaml <<END
x-base: &base
  image: busybox
  command: sleep 1000
services:
  web:
    <<: *base
    x-note: text
  other:
    <<: *base
END
docker-compose up -d
same "$(docker ps -q | wc -l)" 2
