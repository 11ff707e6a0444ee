# Images, builds and registries.

### images
has "$(docker images)" berm.local/busybox latest
### images -q
test -n "$(docker images -q $IMAGE)"
### images -a
docker images -a
### images --digests
docker images --digests
### images --no-trunc
has "$(docker images --no-trunc)" sha256:
### images of a name
same "$(docker images --format '{{.Repository}}:{{.Tag}}' $IMAGE)" "$IMAGE"
### images of a pattern
has "$(docker images --format '{{.Repository}}' 'berm.local/*')" berm.local/busybox
### images --format of all fields
docker images --format '{{.ID}} {{.Repository}} {{.Tag}} {{.Digest}} {{.CreatedSince}} {{.CreatedAt}} {{.Size}}'
### images --filter reference
same "$(docker images --filter reference='berm.local/busy*' --format '{{.Repository}}')" berm.local/busybox
### images --filter dangling
docker images --filter dangling=true
### images --filter label
printf 'FROM %s\nLABEL a=b\n' $IMAGE | docker build -t berm.local/new:1 -
same "$(docker images --filter label=a=b --format '{{.Repository}}')" berm.local/new
### images --filter before and since
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
has "$(docker images --filter since=$IMAGE --format '{{.Repository}}')" berm.local/new
has "$(docker images --filter before=berm.local/new:1 --format '{{.Repository}}')" berm.local/busybox
### image ls
docker image ls
### image ls --tree
docker image ls --tree
### image inspect
same "$(docker image inspect -f '{{.Os}}' $IMAGE)" linux
### image inspect of all that is usual
docker image inspect -f '{{.Id}} {{.RepoTags}} {{.Architecture}} {{.Config.Cmd}} {{.Config.Env}} {{.RootFS.Type}} {{.Size}} {{.Created}}' $IMAGE
### image inspect --platform
docker image inspect --platform linux/amd64 $IMAGE
### image inspect of one that isn't there
has "$(fails docker image inspect nosuch)" "No such image"
### image inspect of a name without a tag
docker image inspect busybox
### history
docker history $IMAGE
### history -q --no-trunc
has "$(docker history -q --no-trunc $IMAGE)" sha256: || docker history -q --no-trunc $IMAGE
### history --format
docker history --format '{{.CreatedBy}} {{.Size}}' -H=false $IMAGE
### tag
docker tag $IMAGE berm.local/new:1
docker run --rm berm.local/new:1 true
### tag without a tag
docker tag $IMAGE berm.local/new
docker run --rm berm.local/new true
### tag of an ID
docker tag "$(docker images -q $IMAGE)" berm.local/new:1
### tag of a tag
docker tag busybox mine:1
docker tag mine:1 mine:2
docker image inspect mine:2
### rmi
docker tag $IMAGE berm.local/new:1
has "$(docker rmi berm.local/new:1)" "Untagged: berm.local/new:1"
### rmi of one that was built
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
has "$(docker rmi berm.local/new:1)" Untagged Deleted
### rmi -f by ID
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
docker rmi -f "$(docker images -q berm.local/new:1)"
### rmi --no-prune
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
docker rmi --no-prune berm.local/new:1
### rmi of one in use
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
docker create --name one berm.local/new:1
fails docker rmi "$(docker images -q berm.local/new:1)"
### rmi of one that isn't there
has "$(fails docker rmi nosuch)" "No such image"
### rmi of one that was pulled
docker pull $REGISTRY/hello:1
docker rmi $REGISTRY/hello:1
### image prune
docker image prune -f
### image prune -a --filter
docker image prune -af --filter label=nosuch
### image prune --filter until
docker image prune -f --filter until=24h
### image prune of a dangling one
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
printf 'FROM %s\nRUN touch /y\n' $IMAGE | docker build -t berm.local/new:1 -
has "$(docker image prune -f)" sha256
### save
docker save $IMAGE | tar t | grep manifest.json
### save -o of many
docker save -o out.tar $IMAGE alpine:3.20
tar tf out.tar >/dev/null
### save and load
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
docker save -o out.tar berm.local/new:1
docker rmi berm.local/new:1
has "$(docker load -i out.tar)" "Loaded image: berm.local/new:1"
docker run --rm berm.local/new:1 test -f /x
### load from standard input, quietly
docker save alpine:3.20 | docker load -q
### load of a compressed file
docker save alpine:3.20 | gzip >out.tar.gz
docker load <out.tar.gz
### load of rubbish
echo rubbish >out.tar
fails docker load -i out.tar
### import
docker create --name one $IMAGE
docker export one | docker import - berm.local/new:1
docker run --rm berm.local/new:1 /bin/true
### import of a file, with -c and -m
docker create --name one $IMAGE
docker export -o fs.tar one
docker import -c 'CMD ["echo", "new"]' -m message fs.tar berm.local/new:1
same "$(docker run --rm berm.local/new:1)" new
### pull
docker pull $REGISTRY/hello:1
docker run --rm $REGISTRY/hello:1 true
### pull -q
same "$(docker pull -q $REGISTRY/hello:1)" $REGISTRY/hello:1
### pull by digest
docker pull $REGISTRY/hello:1
digest=$(docker inspect -f '{{index .RepoDigests 0}}' $REGISTRY/hello:1)
docker pull "$digest"
docker run --rm "$digest" true
### pull -a
docker pull -a $REGISTRY/hello || has "$(fails docker pull -a $REGISTRY/hello)" "hello"
### pull --platform
docker pull --platform linux/amd64 $REGISTRY/hello:1
### pull of what isn't there
has "$(fails docker pull $REGISTRY/nosuch:1)" "not found"
### pull of a tag that isn't there
has "$(fails docker pull $REGISTRY/hello:nosuch)" "manifest"
### push
docker tag $IMAGE $REGISTRY/mine/new:1
docker push $REGISTRY/mine/new:1
docker rmi $REGISTRY/mine/new:1
docker pull $REGISTRY/mine/new:1
### push -q
docker tag $IMAGE $REGISTRY/mine/quiet:1
docker push -q $REGISTRY/mine/quiet:1
### push -a
docker tag $IMAGE $REGISTRY/mine/all:1
docker tag $IMAGE $REGISTRY/mine/all:2
docker push -a $REGISTRY/mine/all
### push of what isn't there
fails docker push $REGISTRY/mine/nosuch:1
### login, push, pull and logout
echo password | docker login -u user --password-stdin $LOGIN
docker tag $IMAGE $LOGIN/mine/new:1
docker push $LOGIN/mine/new:1
docker rmi $LOGIN/mine/new:1
docker pull $LOGIN/mine/new:1
docker logout $LOGIN
docker rmi $LOGIN/mine/new:1
fails docker pull $LOGIN/mine/new:1
### login with a wrong password
has "$(echo wrong | fails docker login -u user --password-stdin $LOGIN)" unauthorized || has "$(echo wrong | fails docker login -u user --password-stdin $LOGIN)" 401
### pull without a login
fails docker pull $LOGIN/mine/new:1
### search
has "$(fails docker search $REGISTRY/nosuch)" nosuch || true
### build
echo text >file
printf 'FROM %s\nCOPY file /file\nRUN cat /file\n' $IMAGE >Dockerfile
docker build -t berm.local/new:1 .
same "$(docker run --rm berm.local/new:1 cat /file)" text
### build -q
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Dockerfile
id=$(docker build -q .)
docker run --rm "$id" test -f /x
### build -f
mkdir sub
printf 'FROM %s\nRUN touch /x\n' $IMAGE >sub/Other
docker build -f sub/Other .
### build -f from outside of the context
mkdir ctx
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Other
docker build -f Other ctx
### build --build-arg
printf 'FROM %s\nARG A=x\nRUN test $A = b\n' $IMAGE >Dockerfile
docker build --build-arg A=b .
### build with an ARG before FROM
printf 'ARG BASE=nosuch\nFROM $BASE\nRUN true\n' >Dockerfile
docker build --build-arg BASE=$IMAGE .
### build --target
printf 'FROM %s AS one\nRUN touch /x\nFROM one AS two\nRUN false\n' $IMAGE >Dockerfile
docker build --target one .
### build of many stages
printf 'FROM %s AS one\nRUN touch /x\nFROM %s\nCOPY --from=one /x /y\n' $IMAGE $IMAGE >Dockerfile
docker build -t berm.local/new:1 .
docker run --rm berm.local/new:1 test -f /y
### build COPY --from of an image
printf 'FROM %s\nCOPY --from=alpine /etc/passwd /y\n' $IMAGE >Dockerfile
docker build .
### build COPY --chown
echo text >file
printf 'FROM %s\nCOPY --chown=1000:1000 file /file\n' $IMAGE >Dockerfile
docker build .
### build with ADD of an archive
echo text >file
tar cf a.tar file
printf 'FROM %s\nADD a.tar /tmp/\nRUN test -f /tmp/file\n' $IMAGE >Dockerfile
docker build .
### build with all instructions
printf 'FROM %s\nLABEL a=b\nENV A=b C=d\nWORKDIR /work\nEXPOSE 80\nVOLUME /vol\nUSER nobody\nSTOPSIGNAL SIGINT\nHEALTHCHECK --interval=5s CMD true\nSHELL ["/bin/sh", "-ec"]\nONBUILD RUN true\nENTRYPOINT ["echo"]\nCMD ["hello"]\n' $IMAGE >Dockerfile
docker build -t berm.local/new:1 .
same "$(docker run --rm berm.local/new:1)" hello
### build with many tags
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Dockerfile
docker build -t berm.local/new:1 -t berm.local/new:2 .
docker run --rm berm.local/new:2 true
### build without a tag of the name
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Dockerfile
docker build -t mine .
docker run --rm mine true
### build from standard input
printf 'FROM %s\nRUN touch /x\n' $IMAGE | docker build -t berm.local/new:1 -
### build of a context from standard input
echo text >file
printf 'FROM %s\nCOPY file /file\n' $IMAGE >Dockerfile
tar c . | docker build -t berm.local/new:1 -
### build of a compressed context from standard input
echo text >file
printf 'FROM %s\nCOPY file /file\n' $IMAGE >Dockerfile
tar cz Dockerfile file | docker build -t berm.local/new:1 -
### build of a context compressed by bzip2
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
tar c Dockerfile | bzip2 | docker build -
### build of a context compressed by xz
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
tar c Dockerfile | xz | docker build -
### build --compress
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --compress .
### build with .dockerignore
echo text >file
echo secret >secret
printf 'FROM %s\nCOPY . /ctx\nRUN test -f /ctx/file && ! test -e /ctx/secret\n' $IMAGE >Dockerfile
echo secret >.dockerignore
docker build .
### build --iidfile
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Dockerfile
docker build --iidfile iid .
docker image inspect "$(cat iid)"
### build --network none
printf 'FROM %s\nRUN ! ip addr show eth0\n' $IMAGE >Dockerfile
docker build --network none .
### build --network default
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --network default .
### build --network host [policy]
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --network host .
### build --cache-from
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Dockerfile
docker build -t berm.local/new:1 .
docker build --cache-from berm.local/new:1 -t berm.local/new:2 .
### build from the cache
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Dockerfile
docker build .
has "$(docker build . 2>&1)" "Using cache"
### build --no-cache
printf 'FROM %s\nRUN touch /x\n' $IMAGE >Dockerfile
docker build .
lacks "$(docker build --no-cache . 2>&1)" "Using cache"
### build --pull
docker pull $REGISTRY/hello:1
printf 'FROM %s\nRUN true\n' $REGISTRY/hello:1 >Dockerfile
docker build --pull .
### build of an image that isn't there yet
printf 'FROM %s\nRUN true\n' $REGISTRY/hello:1 >Dockerfile
docker build .
### build --rm=false
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --rm=false .
### build --force-rm
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --force-rm .
### build --label
printf 'FROM %s\n' $IMAGE >Dockerfile
docker build --label a=b -t berm.local/new:1 .
same "$(docker inspect -f '{{.Config.Labels.a}}' berm.local/new:1)" b
### build has the labels that were given, and no more
printf 'FROM %s\nLABEL a=b\n' $IMAGE >Dockerfile
docker build -t berm.local/new:1 .
same "$(docker inspect -f '{{json .Config.Labels}}' berm.local/new:1)" '{"a":"b"}'
### build -m and --cpu-shares
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build -m 128m --memory-swap 256m --cpu-shares 512 .
### build --shm-size
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --shm-size 32m .
### build --ulimit
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --ulimit nofile=1000:1000 .
### build --add-host
printf 'FROM %s\nRUN grep other /etc/hosts\n' $IMAGE >Dockerfile
docker build --add-host other:192.0.2.7 .
### build --platform
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker build --platform linux/amd64 .
### build --squash of a plain engine
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
has "$(fails docker build --squash .)" experimental
### build that fails
printf 'FROM %s\nRUN exit 5\n' $IMAGE >Dockerfile
has "$(fails docker build .)" "returned a non-zero code: 5"
### build with a mistake in the Dockerfile
printf 'FROM %s\nNOSUCH x\n' $IMAGE >Dockerfile
has "$(fails docker build .)" "unknown instruction"
### build of a missing file
printf 'FROM %s\nCOPY nosuch /x\n' $IMAGE >Dockerfile
has "$(fails docker build .)" nosuch
### build of a large context
head -c 20000000 /dev/urandom >file
printf 'FROM %s\nCOPY file /file\n' $IMAGE >Dockerfile
docker build .
### build with links and odd names
mkdir -p 'a b'
echo text >'a b/ä'
ln -s 'a b/ä' link
printf 'FROM %s\nCOPY . /ctx\nRUN test -f /ctx/link\n' $IMAGE >Dockerfile
docker build .
### image build
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
docker image build .
### builder prune
docker builder prune -f
### build by BuildKit [buildkit]
printf 'FROM %s\nRUN true\n' $IMAGE >Dockerfile
DOCKER_BUILDKIT=1 docker build .
### build by BuildKit with a mounted cache [buildkit]
printf 'FROM %s\nRUN --mount=type=cache,target=/c true\n' $IMAGE >Dockerfile
DOCKER_BUILDKIT=1 docker build .
### build by BuildKit with a secret [buildkit]
echo secret >s
printf 'FROM %s\nRUN --mount=type=secret,id=s cat /run/secrets/s\n' $IMAGE >Dockerfile
DOCKER_BUILDKIT=1 docker build --secret id=s,src=s .
