# Networks, volumes, and the system.

### network create
docker network create net
has "$(docker network ls)" net bridge
### network and container whose names are all hex digits
docker network create 0123456789ab
up cafe0123beef --network 0123456789ab
same "$(docker network inspect -f '{{range .Containers}}{{.Name}}{{end}}' 0123456789ab)" cafe0123beef
### network create -d bridge
docker network create -d bridge net
same "$(docker network inspect -f '{{.Driver}} {{.Scope}}' net)" "bridge local"
### network create --label
docker network create --label a=b net
same "$(docker network ls --filter label=a=b --format '{{.Name}}')" net
### network create has the labels that were given, and no more
docker network create --label a=b net
same "$(docker network inspect -f '{{json .Labels}}' net)" '{"a":"b"}'
### network create --subnet
docker network create --subnet 10.99.1.0/24 net
same "$(docker network inspect -f '{{range .IPAM.Config}}{{.Subnet}}{{end}}' net)" 10.99.1.0/24
### network create --subnet, --gateway and --ip-range
docker network create --subnet 10.99.1.0/24 --gateway 10.99.1.254 --ip-range 10.99.1.128/25 net
### network create --ipv6
docker network create --ipv6 --subnet fd00:99::/64 net
up one --network net
has "$(docker exec one ip addr)" fd00:99
### network create --internal
docker network create --internal net
same "$(docker network inspect -f '{{.Internal}}' net)" true
### network create --attachable
docker network create --attachable net
### network create -o
docker network create -o com.docker.network.bridge.enable_icc=true net
### network create -o mtu
docker network create -o com.docker.network.driver.mtu=1400 net
### network create -d macvlan [policy]
docker network create -d macvlan net
### network create of a name in use
docker network create net
has "$(fails docker network create net)" "already exists"
### network ls -q --no-trunc
docker network create net
test "$(docker network ls -q --no-trunc | wc -l)" -ge 1
### network ls --filter
docker network create net
same "$(docker network ls --filter name=net --filter driver=bridge --format '{{.Name}}')" net
### network ls --filter type
docker network create net
same "$(docker network ls --filter type=custom --filter name=net --format '{{.Name}}')" net
### network ls --filter dangling
docker network create net
has "$(docker network ls --filter dangling=true --format '{{.Name}}')" net
### network ls --format
docker network ls --format '{{.ID}} {{.Name}} {{.Driver}} {{.Scope}} {{.IPv6}} {{.Internal}} {{.Labels}} {{.CreatedAt}}'
### network inspect
docker network create net
up one --network net
has "$(docker network inspect net)" '"Name": "one"'
### network inspect -v
docker network create net
docker network inspect -v net
### network inspect bridge
same "$(docker network inspect -f '{{.Name}}' bridge)" bridge
### network inspect none and host
same "$(docker network inspect -f '{{.Driver}}' none host | tr '\n' ' ')" "null host "
### network inspect bridge has a gateway
docker network inspect -f '{{(index .IPAM.Config 0).Gateway}}' bridge | grep '[.]'
### network inspect of what isn't there
has "$(fails docker network inspect nosuch)" "nosuch"
### network connect and disconnect
docker network create net
up one
docker network connect net one
docker exec one ip addr show eth1
docker network disconnect net one
docker exec one sh -c '! ip addr show eth1'
### network connect --alias
docker network create net
up one
docker network connect --alias other net one
docker run --rm --network net $IMAGE nslookup other 127.0.0.11
### network connect --ip
docker network create --subnet 10.99.1.0/24 net
up one
docker network connect --ip 10.99.1.5 net one
### network connect --link
docker network create net
up one --network net
up two
docker network connect --link one:other net two
docker exec two nslookup other 127.0.0.11
### network connect bridge
docker network create net
up one --network net
docker network connect bridge one
### network disconnect -f
docker network create net
up one --network net
docker network disconnect -f net one
### network rm
docker network create net
docker network create two
docker network rm net two
### network rm of one in use
docker network create net
up one --network net
has "$(fails docker network rm net)" "active endpoints"
### network rm of one that isn't there
fails docker network rm nosuch
### network prune
docker network create net
has "$(docker network prune -f)" net
### network prune --filter
docker network create --label a=b net
docker network create two
docker network prune -f --filter label=a=b
same "$(docker network ls --filter name=two --format '{{.Name}}')" two
### containers find each other by name
docker network create net
docker run -d --name web --network net $IMAGE sh -c 'echo found >/tmp/x; httpd -f -p 80 -h /tmp'
docker run --rm --network net $IMAGE sh -c 'until wget -qO- http://web/x; do sleep 0.1; done'
### containers on bridge reach each other by address
docker run -d --name web $IMAGE sh -c 'echo found >/tmp/x; httpd -f -p 80 -h /tmp'
docker run --rm $IMAGE sh -c "until wget -qO- http://$(field web '{{.NetworkSettings.IPAddress}}')/x; do sleep 0.1; done"
### volume create
same "$(docker volume create vol)" vol
### volume create of no name
docker volume inspect "$(docker volume create)"
### volume create --label
docker volume create --label a=b vol
same "$(docker volume ls --filter label=a=b -q)" vol
### volume create has the labels that were given, and no more
docker volume create --label a=b vol
same "$(docker volume inspect -f '{{json .Labels}}' vol)" '{"a":"b"}'
### volume create -d local
docker volume create -d local vol
### volume create of a bind [policy]
docker volume create -o type=none -o o=bind -o device=/etc vol
### volume create of a tmpfs [policy]
docker volume create -o type=tmpfs -o device=tmpfs -o o=size=8m vol
### volume create twice
docker volume create vol
docker volume create vol
### volume ls
docker volume create vol
has "$(docker volume ls)" vol
### volume ls --filter
docker volume create vol
docker volume create two
same "$(docker volume ls --filter name=vol -q)" vol
### volume ls --filter dangling
docker volume create vol
up one -v two:/data
same "$(docker volume ls --filter dangling=true -q)" vol
### volume ls --filter driver
docker volume create vol
same "$(docker volume ls --filter driver=local -q)" vol
### volume ls --format
docker volume create vol
docker volume ls --format '{{.Name}} {{.Driver}} {{.Scope}} {{.Mountpoint}} {{.Labels}}'
### volume inspect
docker volume create vol
same "$(docker volume inspect -f '{{.Name}} {{.Driver}} {{.Scope}}' vol)" "vol local local"
### volume inspect of what isn't there
has "$(fails docker volume inspect nosuch)" "nosuch"
### volume rm
docker volume create vol
docker volume rm vol
### volume rm -f of what isn't there
docker volume rm -f nosuch
### volume rm of one in use
up one -v vol:/data
has "$(fails docker volume rm vol)" "in use"
### volume prune
up one -v /data
docker rm -f one
docker volume prune -f
### volume prune -a
docker volume create vol
docker volume prune -a -f
same "$(docker volume ls -q)" ""
### volume prune --filter
docker volume create --label a=b vol
docker volume prune -f --filter label!=a
same "$(docker volume ls -q)" vol
### version
has "$(docker version)" Client Server
### version --format
docker version --format '{{.Server.Version}} {{.Server.APIVersion}} {{.Server.Os}} {{.Server.Arch}} {{.Client.Version}}'
### version tells the engine's own
docker version --format '{{range .Server.Components}}{{.Name}} {{end}}' | grep Engine
### info
has "$(docker info)" "Server Version" "Storage Driver"
### info --format
docker info --format '{{.ServerVersion}} {{.OperatingSystem}} {{.Driver}} {{.NCPU}} {{.MemTotal}} {{.Name}} {{.CgroupDriver}}'
### info counts
up one
docker create $IMAGE
same "$(docker info --format '{{.Containers}} {{.ContainersRunning}}')" "2 1"
### info tells of images, the ID and registries
docker info --format '{{.ID}}' | grep ..
[ "$(docker info --format '{{.Images}}')" -ge 1 ]
same "$(docker info --format '{{.ID}}')" "$(docker info --format '{{.ID}}')"
same "$(docker info --format '{{(index .RegistryConfig.IndexConfigs "docker.io").Official}}')" true
has "$(docker info --format '{{range .RegistryConfig.InsecureRegistryCIDRs}}{{.}} {{end}}')" 127.0.0.0/8
### info warns of what the kernel lacks only
docker info 2>&1 | grep WARNING | grep -v 'WARNING: \(No\|Support for\) ' && exit 1
docker info
### info tells of the storage driver
has "$(docker info --format '{{range .DriverStatus}}{{index . 0}}={{index . 1}} {{end}}')" =
### info in JSON
has "$(docker info --format '{{json .}}')" '"ServerVersion"'
### system info
docker system info
### system df
up one -v vol:/data
has "$(docker system df)" Images Containers "Local Volumes"
### system df -v
up one -v vol:/data
has "$(docker system df -v)" vol one
### system df counts images
up one
docker system df --format '{{.Type}} {{.TotalCount}} {{.Active}} {{.Size}}' | grep '^Images [1-9][0-9]* 1 [1-9]'
### system df -v lists images
up one
docker system df -v --format '{{range .Images}}{{.Repository}}:{{.Tag}} {{.Containers}} {{end}}' | grep "$IMAGE 1"
### system df --format
docker system df --format '{{.Type}} {{.TotalCount}} {{.Size}} {{.Reclaimable}}'
### system prune
docker run --name one $IMAGE true
docker system prune -f
same "$(docker ps -aq)" ""
### system prune -a --volumes --filter
docker run --name one --label a=b $IMAGE true
docker system prune -af --filter label=a=b
### system events
docker run --rm --name one $IMAGE true
has "$(docker events --since 1m --until $(($(date +%s) + 1)))" create start die one
### events --filter
docker run --rm --name $CASE $IMAGE true
same "$(docker events --since 1m --until $(($(date +%s) + 1)) --filter container=$CASE --filter event=start --filter type=container --format '{{.Action}}')" start
### events --format json
docker run --rm --name one $IMAGE true
has "$(docker events --since 1m --until $(($(date +%s) + 1)) --format '{{json .}}')" '"start"'
### events --filter label
docker run --rm --label a=b $IMAGE true
has "$(docker events --since 1m --until $(($(date +%s) + 1)) --filter label=a=b)" start
### events of networks and volumes
docker network create net
docker volume create vol
docker network rm net
docker volume rm vol
has "$(docker events --since 1m --until $(($(date +%s) + 1)) --filter type=network --filter type=volume)" "network create" "volume destroy"
### events --filter image
docker run --rm $IMAGE true
has "$(docker events --since 1m --until $(($(date +%s) + 1)) --filter image=$IMAGE)" start
### events while they happen
timeout 20 docker events >out &
sleep 1
docker run --rm --name one $IMAGE true
eventually grep destroy out
kill $! || true
### context ls
docker context ls
### context create, use, inspect and rm
docker context create other --docker host=$DOCKER_HOST
docker context inspect other
host=$DOCKER_HOST
unset DOCKER_HOST
docker --context other ps
docker context use other
docker ps
docker context use default
docker context rm other
### -H
host=$DOCKER_HOST
unset DOCKER_HOST
docker -H $host ps
### DOCKER_API_VERSION
DOCKER_API_VERSION=1.41 docker ps
### DOCKER_API_VERSION of an old client
DOCKER_API_VERSION=1.40 docker run --rm $IMAGE true
### --debug
docker --debug ps
### node ls outside of a swarm
has "$(fails docker node ls)" "not a swarm manager"
### service ls outside of a swarm
has "$(fails docker service ls)" "not a swarm manager"
### secret ls outside of a swarm
has "$(fails docker secret ls)" "not a swarm manager"
### stack ls outside of a swarm
fails docker stack ls
### swarm leave outside of one
has "$(fails docker swarm leave)" "not part of a swarm"
### plugin ls
docker plugin ls
### inspect of every type
has "$(fails docker inspect nosuch)" "No such object"
### container's name and an image's name alike
up busybox
docker inspect busybox
docker inspect --type image busybox
### checkpoint ls
fails docker checkpoint ls nosuch
