export DOCKER_BUILDKIT=1
# dockerfile: standard input becomes the Dockerfile
dockerfile() { cat >Dockerfile; }
T=built:$CASE

### build [buildkit]
dockerfile <<'D'
FROM busybox
RUN echo hello >/hello
CMD cat /hello
D
docker build -t "$T" . >log 2>&1 || { cat log; exit 1; }
same "$(docker run --rm "$T")" hello

### build of an image without a tag [buildkit]
echo hi >f
dockerfile <<'D'
FROM scratch
COPY f /
D
docker build --iidfile iid . >/dev/null 2>&1
docker inspect "$(cat iid)" >/dev/null

### build --target [buildkit]
dockerfile <<'D'
FROM busybox AS one
RUN echo one >/f
FROM busybox AS two
COPY --from=one /f /g
D
docker build --target one -t "$T" .
same "$(docker run --rm "$T" cat /f)" one
docker build -t "$T" .
same "$(docker run --rm "$T" cat /g)" one

### build with a here-document [buildkit]
dockerfile <<'D'
FROM busybox
RUN <<R
echo a >/a
echo b >>/a
R
COPY <<F /c
text
F
D
docker build -t "$T" .
same "$(docker run --rm "$T" cat /a /c | tr '\n' ' ')" 'a b text '

### build --secret [buildkit]
echo s3cret >token
dockerfile <<'D'
FROM busybox
RUN --mount=type=secret,id=token wc -c </run/secrets/token >/n
D
docker build --secret id=token,src=token -t "$T" .
same "$(docker run --rm "$T" cat /n)" 7

### build of standard input [buildkit]
printf 'FROM busybox\nRUN echo x >/x\n' | docker build -t "$T" -
same "$(docker run --rm "$T" cat /x)" x

### build of a tar from standard input [buildkit]
echo FROM scratch >Dockerfile; echo COPY f / >>Dockerfile; echo 1 >f
tar c . | docker build -t "$T" -

### build --build-context [buildkit]
mkdir other; echo from-other >other/f
dockerfile <<'D'
FROM busybox
COPY --from=other f /f
D
docker build --build-context other=other -t "$T" .
same "$(docker run --rm "$T" cat /f)" from-other

### build --build-context of an image [buildkit]
dockerfile <<'D'
FROM base
RUN true
D
docker build --build-context base=docker-image://busybox -t "$T" .

### build --build-arg, --label, --file [buildkit]
mkdir sub
cat >sub/other <<'D'
FROM busybox
ARG A
RUN echo "$A" >/a
D
docker build --build-arg A=1 --label k=v -f sub/other -t "$T" .
same "$(docker run --rm "$T" cat /a)" 1
same "$(docker inspect -f '{{.Config.Labels.k}}' "$T")" v

### build --output type=image [buildkit]
printf 'FROM busybox\nRUN echo out >/f\n' >Dockerfile
docker build -o type=image,name="$T" .
same "$(docker run --rm "$T" cat /f)" out

### build --output type=local [buildkit]
echo hi >f
printf 'FROM scratch\nCOPY f /f\n' >Dockerfile
docker build -o out .
same "$(cat out/f)" hi

### build --output type=tar [buildkit]
echo hi >f
printf 'FROM scratch\nCOPY f /f\n' >Dockerfile
docker build -o type=tar,dest=out.tar .
same "$(tar xOf out.tar f)" hi

### build --output type=docker [buildkit]
echo hi >f
printf 'FROM scratch\nCOPY f /f\n' >Dockerfile
docker build -o type=docker,dest=out.tar .
tar tf out.tar | grep -q manifest.json

### build --output type=oci [buildkit]
echo hi >f
printf 'FROM scratch\nCOPY f /f\n' >Dockerfile
docker build -o type=oci,dest=out.tar .
tar tf out.tar | grep -q index.json

### build --metadata-file [buildkit]
printf 'FROM scratch\nCOPY Dockerfile /f\n' >Dockerfile
docker build --metadata-file meta -t "$T" .
grep -q containerimage meta

### build --call [buildkit]
printf 'FROM busybox AS a\nARG X\n' >Dockerfile
has "$(docker build --call outline . 2>&1)" X
has "$(docker build --call targets . 2>&1)" a

### build --check [buildkit]
printf 'FROM busybox\n' >Dockerfile
docker build --check .

### build --pull [buildkit]
printf 'FROM %s/hello:1\n' "$REGISTRY" >Dockerfile
docker build --pull -t "$T" .

### build --no-cache [buildkit]
printf 'FROM busybox\nRUN date +%%s%%N >/d\n' >Dockerfile
docker build -t "$T" .
one=$(docker run --rm "$T" cat /d)
docker build -t "$T" .
same "$(docker run --rm "$T" cat /d)" "$one"
docker build --no-cache -t "$T" .
two=$(docker run --rm "$T" cat /d)
test "$one" != "$two"

### build with an inline cache [buildkit]
printf 'FROM busybox\nRUN echo 1 >/d\n' >Dockerfile
docker build --cache-to type=inline -t "$T" .

### build --provenance [buildkit]
printf 'FROM busybox\nRUN echo 1 >/d\n' >Dockerfile
docker build --provenance=mode=max -t "$T" .

### build --progress plain shows names as they are [buildkit]
printf 'FROM busybox\nRUN echo 1\n' >Dockerfile
said=$(docker build --progress plain --no-cache . 2>&1)
has "$said" busybox
lacks "$said" berm.invalid

### build fails with the command's error [buildkit]
printf 'FROM busybox\nRUN echo to-be-seen; exit 3\n' >Dockerfile
said=$(fails docker build --no-cache --progress plain .)
has "$said" 'exit code: 3' to-be-seen

### build of what isn't there [buildkit]
printf 'FROM %s/nothing:1\n' "$REGISTRY" >Dockerfile
said=$(fails docker build .)
has "$said" 'not found'

### build with cache mounts [buildkit]
dockerfile <<'D'
FROM busybox
RUN --mount=type=cache,target=/c echo 1 >>/c/f; cp /c/f /f
D
docker build -t "$T" .

### build with a bind mount [buildkit]
echo in >f
dockerfile <<'D'
FROM busybox
RUN --mount=type=bind,source=f,target=/in cp /in /out
D
docker build -t "$T" .
same "$(docker run --rm "$T" cat /out)" in

### bake [buildkit]
printf 'FROM busybox\nRUN echo 1 >/d\n' >Dockerfile
cat >docker-bake.hcl <<D
target "default" { tags = ["$T"] }
D
docker buildx bake --progress plain
docker run --rm "$T" cat /d

### bake of linked targets [buildkit]
printf 'FROM busybox\nRUN echo base >/d\n' >a
printf 'FROM base\nRUN cp /d /e\n' >b
cat >docker-bake.hcl <<D
target "base" { dockerfile = "a" }
target "default" {
  dockerfile = "b"
  contexts = { base = "target:base" }
  tags = ["$T"]
}
D
docker buildx bake --progress plain
same "$(docker run --rm "$T" cat /e)" base

### bake of a group of targets [buildkit]
for s in a b c; do printf 'FROM busybox\nRUN echo %s >/d\n' $s >$s; done
cat >docker-bake.hcl <<D
group "default" { targets = ["a", "b", "c"] }
target "a" {
  dockerfile = "a"
  tags = ["$T-a"]
}
target "b" {
  dockerfile = "b"
  tags = ["$T-b"]
}
target "c" {
  dockerfile = "c"
  tags = ["$T-c"]
}
D
docker buildx bake --progress plain
for s in a b c; do same "$(docker run --rm "$T-$s" cat /d)" $s; done

### a syntax line [buildkit]
printf '# syntax=docker/dockerfile:1\nFROM busybox\n' >Dockerfile
docker build -t "$T" .
