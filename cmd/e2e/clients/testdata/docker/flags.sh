# docker run with its flags.
same() { # GOT WANT
	[ "$1" = "$2" ] || { echo "got: $1"; echo "want: $2"; return 1; }
}
until_ok() { # COMMAND...: waits until it succeeds; the case's timeout ends it
	until "$@" >/dev/null 2>&1; do sleep 0.1; done
}
field() { # CONTAINER TEMPLATE
	docker inspect --format "$2" "$1"
}

### run
same "$(docker run $IMAGE echo hello)" hello
### run --rm
same "$(docker run --rm $IMAGE echo hello)" hello
same "$(docker ps -aq)" ""
### run with an exit code
docker run --rm $IMAGE sh -c 'exit 7' || same $? 7
### run of a missing program
docker run --rm $IMAGE nosuch || same $? 127
### run of what isn't a program
docker run --rm $IMAGE /etc/passwd || same $? 126
### run --privileged [policy]
docker run --rm --privileged $IMAGE true
