# What is done with containers.

### start of many
docker create --name one $IMAGE sleep 100
docker create --name two $IMAGE sleep 100
docker start one two
same "$(docker ps -q | wc -l)" 2
### start -i
docker create -i --name one $IMAGE cat
same "$(echo typed | docker start -i one)" typed
### start --detach-keys
docker create --name one $IMAGE sleep 100
docker start --detach-keys ctrl-a one
### stop
up one --init
docker stop one
same "$(field one '{{.State.Status}}')" exited
### stop -t
up one
docker stop -t 0 one
### stop -s
up one
docker stop -s KILL one
### restart
up one --init
docker restart one
same "$(field one '{{.State.Running}}')" true
### restart -t
up one
docker restart -t 0 one
### kill
up one
docker kill one
same "$(field one '{{.State.ExitCode}}')" 137
### kill -s
docker run -d --name one $IMAGE sh -c 'trap "exit 5" HUP; echo up; while :; do sleep 0.1; done'
eventually logged one up
docker kill -s HUP one
same "$(docker wait one)" 5
### kill -s by number
up one
docker kill --signal 9 one
### pause and unpause
up one
docker pause one
same "$(docker ps --filter status=paused --format '{{.Names}}')" one
docker unpause one
### wait
docker run -d --name one $IMAGE sh -c 'exit 3'
same "$(docker wait one)" 3
### wait of a running one
docker run -d --name one $IMAGE sh -c 'sleep 1; exit 4'
same "$(docker wait one)" 4
### rename
up one
docker rename one two
docker exec two true
### rename to a name in use
up one
up two
has "$(fails docker rename one two)" "in use"
### update -m
up one -m 64m
docker update -m 128m --memory-swap 256m one
same "$(field one '{{.HostConfig.Memory}}')" 134217728
### update --cpus
up one
docker update --cpus 0.5 one
### update --cpu-shares
up one
docker update --cpu-shares 256 one
### update --pids-limit
up one
docker update --pids-limit 99 one
### update --restart
up one
docker update --restart unless-stopped one
same "$(field one '{{.HostConfig.RestartPolicy.Name}}')" unless-stopped
### rm
docker create --name one $IMAGE
docker rm one
same "$(docker ps -aq)" ""
### rm of a running one
up one
has "$(fails docker rm one)" "running"
### rm -f
up one
docker rm -f one
### rm -v
docker run --name one -v /data $IMAGE true
docker rm -v one
same "$(docker volume ls -q)" ""
### rm of one that isn't there
has "$(fails docker rm nosuch)" "No such container"
### rm -f of many
up one
up two
docker rm -f one two
### container prune
docker run --name one --label a=b $IMAGE true
docker run --name two $IMAGE true
docker container prune -f --filter label=a=b
same "$(docker ps -a --format '{{.Names}}')" two
### container prune --filter until
docker run --name one $IMAGE true
docker container prune -f --filter until=24h
same "$(docker ps -a --format '{{.Names}}')" one
### exec
up one
same "$(docker exec one echo hello)" hello
### exec -i
up one
same "$(echo typed | docker exec -i one cat)" typed
### exec -it
up one
has "$(script -qec "docker exec -it one sh -c 'test -t 0 && echo terminal'" /dev/null)" terminal
### exec -d
up one
docker exec -d one touch /x
eventually docker exec one test -f /x
### exec -e
up one
same "$(docker exec -e A=b one sh -c 'echo $A')" b
### exec --env-file
up one
echo A=b >env
same "$(docker exec --env-file env one sh -c 'echo $A')" b
### exec -w
up one
same "$(docker exec -w /tmp one pwd)" /tmp
### exec -u
up one
same "$(docker exec -u nobody one id -un)" nobody
### exec --privileged [policy]
up one
docker exec --privileged one true
### exec with an exit code
up one
docker exec one sh -c 'exit 9' || same $? 9
### exec of a missing program
up one
docker exec one nosuch || has "126 127" $?
### exec in a stopped one
docker create --name one $IMAGE
has "$(fails docker exec one true)" "is not running"
### exec in a paused one
up one
docker pause one
has "$(fails docker exec one true)" "is paused"
### exec --detach-keys
up one
docker exec --detach-keys ctrl-a one true
### exec with much output
up one
same "$(docker exec one sh -c 'yes | head -c 1000000' | wc -c)" 1000000
### logs
docker run --name one $IMAGE sh -c 'echo out; echo err >&2'
same "$(docker logs one 2>/dev/null)" out
same "$(docker logs one 2>&1 >/dev/null)" err
### logs -f
docker run -d --name one $IMAGE sh -c 'echo first; sleep 1; echo last'
same "$(docker logs -f one | tr '\n' ' ')" "first last "
### logs --tail
docker run --name one $IMAGE seq 10
same "$(docker logs --tail 2 one | tr '\n' ' ')" "9 10 "
### logs -n
docker run --name one $IMAGE seq 10
same "$(docker logs -n 1 one)" 10
### logs --tail all
docker run --name one $IMAGE seq 10
same "$(docker logs --tail all one | wc -l)" 10
### logs -t
docker run --name one $IMAGE echo said
has "$(docker logs -t one)" T "Z said"
### logs --since
docker run --name one $IMAGE echo said
has "$(docker logs --since 10m one)" said
### logs --since and --until by times
docker run --name one $IMAGE echo said
same "$(docker logs --since 2001-01-01T00:00:00Z --until 2001-01-02T00:00:00Z one)" ""
### logs --details
docker run --name one $IMAGE echo said
has "$(docker logs --details one)" said
### logs of one that isn't there
has "$(fails docker logs nosuch)" "No such container"
### attach
docker run -d --name one $IMAGE sh -c 'sleep 1; echo said'
same "$(docker attach one)" said
### attach with input
docker run -di --name one $IMAGE sh -c 'read x; sleep 1; echo $x'
same "$(echo typed | docker attach one)" typed
### attach --no-stdin
docker run -di --name one $IMAGE sh -c 'sleep 1; echo said'
same "$(docker attach --no-stdin one)" said
### attach --sig-proxy
docker run -d --name one $IMAGE sh -c 'sleep 1; echo said'
docker attach --sig-proxy=false one
### cp out
docker create --name one $IMAGE
docker cp one:/etc/passwd .
grep root passwd
### cp in
docker create --name one $IMAGE
echo text >file
docker cp file one:/tmp/file
docker cp one:/tmp/file back
same "$(cat back)" text
### cp of a directory
docker create --name one $IMAGE
mkdir -p dir/sub
echo text >dir/sub/file
docker cp dir one:/tmp/new
docker cp one:/tmp/new back
same "$(cat back/sub/file)" text
### cp of a directory's contents
docker create --name one $IMAGE
mkdir dir
echo text >dir/file
docker cp dir/. one:/tmp
docker cp one:/tmp/file back
### cp to a running one
up one
echo text >file
docker cp file one:/tmp/
same "$(docker exec one cat /tmp/file)" text
### cp from standard input
docker create --name one $IMAGE
echo text >file
tar c file | docker cp - one:/tmp
docker cp one:/tmp/file back
### cp to standard output
docker create --name one $IMAGE
has "$(docker cp one:/etc/passwd - | tar tf -)" passwd
### cp -a
docker create --name one $IMAGE
echo text >file
docker cp -a file one:/tmp/file
### cp -L
docker create --name one $IMAGE
docker cp -L one:/bin/sh sh
test -f sh
### cp of a link
docker create --name one $IMAGE
docker cp one:/bin/sh sh
test -L sh
### cp -q
docker create --name one $IMAGE
docker cp -q one:/etc/passwd .
### cp of a missing path
docker create --name one $IMAGE
fails docker cp one:/nosuch .
### cp into a volume
up one -v vol:/data
echo text >file
docker cp file one:/data/file
docker exec one test -f /data/file
### cp into a mounted directory
mkdir data
up one -v "$PWD/data:/data"
echo text >file
docker cp file one:/data/file
test -f data/file
### top
up one
has "$(docker top one)" "sleep 1000"
### top with ps options
up one
has "$(docker top one -o pid,args)" "sleep 1000"
### top aux
up one
has "$(docker top one aux)" "sleep 1000"
### stats --no-stream
up one
has "$(docker stats --no-stream)" one
### stats --no-stream of one, with a format
up one
same "$(docker stats --no-stream --format '{{.Name}}' one)" one
### stats -a --no-trunc
docker create --name one $IMAGE
docker stats --no-stream -a --no-trunc
### stats
up one
timeout 3 docker stats one >out || true
grep one out
### port
up one -p 18080:80
has "$(docker port one)" 18080
### port of one that isn't published
up one
fails docker port one 80
### diff
docker run --name one $IMAGE touch /tmp/x
has "$(docker diff one)" "A /tmp/x"
### export
docker create --name one $IMAGE
docker export one | tar t | grep etc/passwd
### export -o
docker create --name one $IMAGE
docker export -o out.tar one
tar tf out.tar >/dev/null
### commit
docker run --name one $IMAGE touch /x
docker commit one berm.local/new:1
docker run --rm berm.local/new:1 test -f /x
### commit without a name
docker run --name one $IMAGE touch /x
docker run --rm "$(docker commit one)" test -f /x
### commit -m and -a
docker create --name one $IMAGE
docker commit -m message -a author one berm.local/new:1
same "$(docker inspect -f '{{.Comment}} {{.Author}}' berm.local/new:1)" "message author"
### commit -c
docker create --name one $IMAGE
docker commit -c 'CMD ["echo", "new"]' -c 'ENV A=b' -c 'WORKDIR /tmp' -c 'EXPOSE 80' -c 'LABEL a=b' one berm.local/new:1
same "$(docker run --rm berm.local/new:1)" new
### commit -p
up one
docker commit -p=false one berm.local/new:1
### inspect
up one
has "$(docker inspect one)" '"Name": "/one"'
### inspect --format
up one -e A=b
same "$(docker inspect -f '{{.State.Status}} {{.Name}} {{.Config.Image}}' one)" "running /one $IMAGE"
### inspect -s
up one
same "$(docker inspect -s -f '{{.SizeRw}}' one)" 0 || has "$(docker inspect -s -f '{{.SizeRw}}' one)" ""
### inspect --type
up one
docker inspect --type container one
docker inspect --type image $IMAGE
has "$(fails docker inspect --type image one)" "No such image"
### inspect of what isn't there
has "$(fails docker inspect nosuch)" "No such object: nosuch"
### inspect of a network and a volume
docker network create net
docker volume create vol
same "$(docker inspect -f '{{.Name}}' net vol | tr '\n' ' ')" "net vol "
### inspect by a prefix of the ID
id=$(docker run -d $IMAGE sleep 100)
docker inspect "$(echo "$id" | cut -c1-6)"
### inspect shows mounts as they were asked for
up one -v "$PWD:/data:ro" -v vol:/vol
same "$(field one '{{range .Mounts}}{{if eq .Type "bind"}}{{.Source}} {{.RW}}{{end}}{{end}}')" "$PWD false"
has "$(field one '{{json .HostConfig.Binds}}')" "$PWD:/data:ro"
### ps
up one
has "$(docker ps)" CONTAINER one sleep
### ps -a
docker create --name one $IMAGE
has "$(docker ps -a)" Created
### ps -l and -n
up one
up two
same "$(docker ps -l --format '{{.Names}}')" two
same "$(docker ps -n 1 --format '{{.Names}}')" two
### ps -s
up one
has "$(docker ps -s)" virtual
### ps --no-trunc
up one
docker ps --no-trunc
### ps --format json
up one
has "$(docker ps --format '{{json .}}')" '"Names":"one"'
### ps --format of all fields
up one -p 80 -v vol:/x
docker ps --format 'table {{.ID}}\t{{.Image}}\t{{.Command}}\t{{.CreatedAt}}\t{{.RunningFor}}\t{{.Ports}}\t{{.State}}\t{{.Status}}\t{{.Size}}\t{{.Names}}\t{{.Labels}}\t{{.Mounts}}\t{{.Networks}}'
### ps shows no labels that weren't given
up one --label a=b
same "$(docker ps --format '{{.Labels}}')" a=b
### ps --filter name
up one
up two
same "$(docker ps --filter name=one --format '{{.Names}}')" one
### ps --filter name as a pattern
up one
up onemore
same "$(docker ps --filter 'name=^/one$' --format '{{.Names}}')" one
### ps --filter id
up one
up two
same "$(docker ps --filter id="$(field one '{{.Id}}')" --format '{{.Names}}')" one
### ps --filter status
up one
docker create --name two $IMAGE
same "$(docker ps -a --filter status=created --format '{{.Names}}')" two
### ps --filter exited
docker run --name one $IMAGE false || true
same "$(docker ps -a --filter exited=1 --format '{{.Names}}')" one
### ps --filter ancestor
up one
same "$(docker ps --filter ancestor=$IMAGE --format '{{.Names}}')" one
### ps --filter ancestor of none
up one
same "$(docker ps --filter ancestor=nosuch -q)" ""
### ps --filter before and since
up one
up two
same "$(docker ps --filter before=two --format '{{.Names}}')" one
same "$(docker ps --filter since=one --format '{{.Names}}')" two
### ps --filter volume
up one -v vol:/data
up two
same "$(docker ps --filter volume=vol --format '{{.Names}}')" one
### ps --filter network
docker network create net
up one --network net
up two
same "$(docker ps --filter network=net --format '{{.Names}}')" one
### ps --filter publish and expose
up one -p 18080:80
up two
same "$(docker ps --filter publish=18080 --format '{{.Names}}')" one
same "$(docker ps --filter expose=80 --format '{{.Names}}')" one
### ps --filter label of none
up one
same "$(docker ps --filter label=nosuch -q)" ""
### ps --filter is-task
up one
same "$(docker ps --filter is-task=false --format '{{.Names}}')" one
### container ls
up one
same "$(docker container ls -q | wc -l)" 1
### container inspect
up one
docker container inspect one
has "$(fails docker container inspect nosuch)" "No such container"
