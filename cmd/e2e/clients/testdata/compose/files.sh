# Compose: files, networks, volumes, secrets and configs.

### a version in the file
web <<END
version: "3.8"
END
docker-compose up -d
### -f
web </dev/null
mv compose.yaml other.yaml
docker-compose -f other.yaml up -d
same "$(docker-compose -f other.yaml ps -q | wc -l)" 1
### -f of several
web <<END
    environment: {A: b, C: d}
END
echo 'services: {web: {environment: {A: c}}}' >more.yaml
docker-compose -f compose.yaml -f more.yaml up -d
same "$(docker-compose exec -T web sh -c 'echo $A$C')" cd
### an override file
web </dev/null
mv compose.yaml docker-compose.yml
echo 'services: {web: {environment: {A: c}}}' >docker-compose.override.yml
docker-compose up -d
same "$(docker-compose exec -T web sh -c 'echo $A')" c
### --project-directory
mkdir app
echo text >app/file
web <<END
    volumes: [./file:/file]
END
docker-compose --project-directory app -f compose.yaml up -d
same "$(docker-compose --project-directory app -f compose.yaml exec -T web cat /file)" text
### --env-file
echo VALUE=b >mine.env
web <<'END'
    environment: {A: "${VALUE}"}
END
docker-compose --env-file mine.env up -d
same "$(docker-compose --env-file mine.env exec -T web sh -c 'echo $A')" b
### --profile
web <<END
  debug:
    image: busybox
    command: sleep 1000
    stop_signal: KILL
    profiles: [debug]
END
docker-compose up -d
same "$(docker ps -q | wc -l)" 1
docker-compose --profile debug up -d
same "$(docker ps -q | wc -l)" 2
docker-compose --profile debug down
same "$(docker ps -aq)" ""
### extends
cat >base.yaml <<END
services: {base: {image: busybox, command: sleep 1000, environment: {A: b}}}
END
cat >compose.yaml <<END
services: {web: {extends: {file: base.yaml, service: base}, environment: {C: d}}}
END
docker-compose up -d
same "$(docker-compose exec -T web sh -c 'echo $A$C')" bd
### include
mkdir part
echo 'services: {db: {image: busybox, command: sleep 1000}}' >part/compose.yaml
web <<END
    depends_on: [db]
include: [part/compose.yaml]
END
docker-compose up -d
same "$(docker ps -q | wc -l)" 2
### !reset and !override
web <<END
    environment: {A: b}
    ports: ["18080:80"]
END
printf 'services:\n  web:\n    ports: !reset []\n    environment: !override {C: d}\n' >more.yaml
docker-compose -f compose.yaml -f more.yaml up -d
same "$(of web '{{len .HostConfig.PortBindings}}')" 0
### services reach each other by name
web <<END
  db:
    image: busybox
    command: sleep 1000
END
docker-compose up -d
docker-compose exec -T web nslookup db 127.0.0.11
### services don't reach those of other networks
web <<END
    networks: [front]
  db:
    image: busybox
    command: sleep 1000
    networks: [back]
networks: {front: {}, back: {}}
END
docker-compose up -d
fails docker-compose exec -T web nslookup db 127.0.0.11
### networks of several, up again and a restart
web <<END
    networks: {front: {aliases: [one]}, back: {aliases: [two]}}
networks: {front: {}, back: {}}
END
docker-compose up -d
before=$(docker-compose ps -q)
docker-compose up -d
docker-compose restart
same "$(docker-compose ps -q)" "$before"
same "$(of web '{{len .NetworkSettings.Networks}}')" 2
### networks with aliases
web <<END
    networks: {net: {aliases: [other, more.example.org]}}
networks: {net: {}}
END
docker-compose up -d
docker-compose exec -T web nslookup more.example.org 127.0.0.11
### networks that are external
docker network create mine
web <<END
    networks: [net]
networks: {net: {external: true, name: mine}}
END
docker-compose up -d
docker-compose down
docker network inspect mine
### networks that are internal
web <<END
    networks: [net]
networks: {net: {internal: true}}
END
docker-compose up -d
same "$(docker network inspect -f '{{.Internal}}' "${CASE}_net")" true
### networks with ipam
web <<END
networks: {default: {ipam: {driver: default, config: [{subnet: 10.99.1.0/24, gateway: 10.99.1.254, ip_range: 10.99.1.128/25}]}}}
END
docker-compose up -d
has "$(docker-compose exec -T web ip route)" 10.99.1.254
### networks with a static address
web <<END
    networks: {net: {ipv4_address: 10.99.1.77}}
networks: {net: {ipam: {config: [{subnet: 10.99.1.0/24}]}}}
END
docker-compose up -d
docker-compose restart
has "$(docker-compose exec -T web ip addr)" 10.99.1.77
### networks with a static address, recreated
web <<END
    networks: {net: {ipv4_address: 10.99.1.77}}
networks: {net: {ipam: {config: [{subnet: 10.99.1.0/24}]}}}
END
docker-compose up -d
docker-compose up -d --force-recreate
has "$(docker-compose exec -T web ip addr)" 10.99.1.77
### networks with IPv6
web <<END
    networks: {net: {ipv6_address: "fd00:99::77"}}
networks: {net: {enable_ipv6: true, ipam: {config: [{subnet: 10.99.1.0/24}, {subnet: "fd00:99::/64"}]}}}
END
docker-compose up -d
has "$(docker-compose exec -T web ip addr)" fd00:99::77
### networks with options, labels and attachable
web <<END
networks: {default: {driver: bridge, attachable: true, labels: {a: b}, driver_opts: {com.docker.network.driver.mtu: "1400"}}}
END
docker-compose up -d
has "$(docker-compose exec -T web ip link show eth0)" 1400
same "$(docker network inspect -f '{{.Labels.a}}' "${CASE}_default")" b
### networks with a MAC address
web <<END
    mac_address: "02:42:ac:11:00:99"
END
docker-compose up -d
has "$(docker-compose exec -T web ip link show eth0)" 02:42:ac:11:00:99
### networks that change are made anew
web <<END
networks: {default: {labels: {a: b}}}
END
docker-compose up -d
sed -i 's/a: b/a: c/' compose.yaml
docker-compose up -d
same "$(docker network inspect -f '{{.Labels.a}}' "${CASE}_default")" c
docker-compose exec -T web true
### networks with gw_priority and interface_name
web <<END
    networks: {front: {gw_priority: 1, interface_name: front0}, back: {}}
networks: {front: {}, back: {}}
END
docker-compose up -d
has "$(docker-compose exec -T web ip link)" front0
### volumes are shared and stay
web <<END
    volumes: [data:/data]
  other:
    image: busybox
    command: sleep 1000
    stop_signal: KILL
    volumes: [data:/data:ro]
volumes: {data: {}}
END
docker-compose up -d
docker-compose exec -T web touch /data/x
docker-compose down
docker-compose up -d
docker-compose exec -T other sh -c 'test -e /data/x && ! touch /data/y'
### volumes that are external
docker volume create mine
web <<END
    volumes: [data:/data]
volumes: {data: {external: true, name: mine}}
END
docker-compose up -d
has "$(of web '{{json .Mounts}}')" '"mine"'
### volumes in the long syntax
web <<END
    volumes: [{type: volume, source: data, target: /data, volume: {nocopy: true}}, {type: volume, target: /cache}]
volumes: {data: {}}
END
docker-compose up -d
docker-compose exec -T web touch /data/x /cache/x
### volumes of a directory
echo text >file
web <<END
    volumes: [.:/data]
END
docker-compose up -d
same "$(docker-compose exec -T web cat /data/file)" text
docker-compose exec -T web touch /data/x
test -e x
### volumes of a directory, read-only
web <<END
    volumes: ["./:/data:ro"]
END
docker-compose up -d
docker-compose exec -T web sh -c '! touch /data/x'
### volumes of a missing directory
web <<END
    volumes: ["./new/deep:/data"]
END
docker-compose up -d
docker-compose exec -T web touch /data/x
test -e new/deep/x
### volumes of a missing directory without create_host_path
web <<END
    volumes: [{type: bind, source: ./new, target: /data, bind: {create_host_path: false}}]
END
fails docker-compose up -d
test ! -e new
### volumes of a file
echo text >file
web <<END
    volumes: [./file:/etc/config:ro]
END
docker-compose up -d
same "$(docker-compose exec -T web cat /etc/config)" text
### volumes of a file, up again
echo text >file
web <<END
    volumes: [./file:/etc/config, .:/data]
END
docker-compose up -d
before=$(docker-compose ps -q)
docker-compose up -d
same "$(docker-compose ps -q)" "$before"
docker-compose up -d --force-recreate
same "$(docker-compose exec -T web cat /etc/config)" text
### volumes below another
mkdir app
echo text >app/file
web <<END
    volumes: [./app:/app, /app/node_modules, cache:/app/cache]
volumes: {cache: {}}
END
docker-compose up -d
docker-compose exec -T web touch /app/node_modules/x /app/cache/x
docker-compose restart
docker-compose exec -T web test -e /app/node_modules/x
### volumes of a tmpfs
web <<END
    volumes: [{type: tmpfs, target: /data, tmpfs: {size: 8388608, mode: 0o1777}}]
END
docker-compose up -d
has "$(docker-compose exec -T web mount)" "size=8192k"
### volumes of docker.sock
web <<END
    volumes: [/var/run/docker.sock:/var/run/docker.sock]
END
docker-compose up --no-start
### volumes_from
web <<END
    volumes_from: [db]
  db:
    image: busybox
    command: sleep 1000
    volumes: [/data]
END
docker-compose up -d
docker-compose exec -T db touch /data/x
docker-compose exec -T web test -e /data/x
### volumes with a subpath [policy]
web <<END
    volumes: [{type: volume, source: data, target: /sub, volume: {subpath: sub}}, data:/data]
    depends_on: {init: {condition: service_completed_successfully}}
  init:
    image: busybox
    command: mkdir /data/sub
    volumes: [data:/data]
volumes: {data: {}}
END
docker-compose up -d
docker-compose exec -T web sh -c 'touch /sub/x && test -e /data/sub/x'
### secrets of a file
printf text >key
web <<END
    secrets: [key]
secrets: {key: {file: ./key}}
END
docker-compose up -d
same "$(docker-compose exec -T web cat /run/secrets/key)" text
### secrets of the environment
web <<END
    secrets: [key]
secrets: {key: {environment: KEY}}
END
KEY=text docker-compose up -d
same "$(docker-compose exec -T web cat /run/secrets/key)" text
### secrets of the environment with an owner and a mode
web <<END
    user: "1000"
    secrets: [{source: key, uid: "1000", gid: "1000", mode: 0400}]
secrets: {key: {environment: KEY}}
END
KEY=text docker-compose up -d
same "$(docker-compose exec -T web cat /run/secrets/key)" text
### configs with a target
echo text >config
web <<END
    configs: [{source: config, target: /etc/app/config}]
configs: {config: {file: ./config}}
END
docker-compose up -d
same "$(docker-compose exec -T web cat /etc/app/config)" text
### configs with content
web <<'END'
    configs: [{source: config, target: /etc/app/config, mode: 0444}]
configs: {config: {content: "of ${CASE}"}}
END
docker-compose up -d
same "$(docker-compose exec -T web cat /etc/app/config)" "of $CASE"
### run with secrets and configs
printf text >key
web <<END
    secrets: [key]
    configs: [config]
secrets: {key: {file: ./key}}
configs: {config: {content: more}}
END
same "$(docker-compose run --rm -T web cat /run/secrets/key /config)" textmore
### a stack of three
mkdir html
echo found >html/index.html
cat >compose.yaml <<'END'
services:
  db:
    image: busybox
    command: sh -c "echo row >/data/table; sleep 1000"
    volumes: [data:/data]
    networks: [back]
    healthcheck: {test: "test -e /data/table", interval: 1s}
    restart: unless-stopped
    stop_signal: KILL
  app:
    image: busybox
    command: httpd -f -p 8080 -h /html
    volumes: [./html:/html:ro, data:/data:ro]
    environment: [DB=db]
    depends_on: {db: {condition: service_healthy}}
    networks: [front, back]
    stop_signal: KILL
  web:
    image: busybox
    command: sh -c 'while ! wget -qO- app:8080; do sleep 0.1; done; sleep 1000'
    depends_on: [app]
    networks: [front]
    ports: ["127.0.0.1:18080:80"]
    stop_signal: KILL
networks: {front: {}, back: {internal: true}}
volumes: {data: {}}
END
docker-compose up -d
eventually sh -c 'docker-compose logs web | grep found'
docker-compose down -v
same "$(docker ps -aq)$(docker volume ls -q)" ""
