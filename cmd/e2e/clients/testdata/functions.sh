# Functions of all cases.

# same GOT WANT
same() {
	[ "$1" = "$2" ] || {
		printf 'got: %s\nwant: %s\n' "$1" "$2"
		return 1
	}
}
# has TEXT PATTERN...
has() {
	text=$1
	shift
	for pattern; do
		case $text in
		*"$pattern"*) ;;
		*)
			printf 'got: %s\nwithout: %s\n' "$text" "$pattern"
			return 1
			;;
		esac
	done
}
# lacks TEXT PATTERN
lacks() {
	case $1 in *"$2"*)
		printf 'got: %s\nwith: %s\n' "$1" "$2"
		return 1
		;;
	esac
}
# fails COMMAND...: prints what it says
fails() {
	if said=$("$@" 2>&1); then
		echo "it passed: $*: $said"
		return 1
	fi
	printf '%s\n' "$said"
}
# eventually COMMAND...: the bound of the case ends it
eventually() {
	until "$@" >/dev/null 2>&1; do sleep 0.1; done
}
# field CONTAINER TEMPLATE
field() {
	docker inspect --format "$2" "$1"
}
# up NAME FLAG...: a container that sleeps
up() {
	name=$1
	shift
	docker run -d --name "$name" "$@" "$IMAGE" sleep 1000 >/dev/null
}
# logged CONTAINER TEXT
logged() {
	docker logs "$1" 2>&1 | grep -q "$2"
}
# web writes a compose.yaml with a service that sleeps, and with what it reads
web() {
	{
		printf 'services:\n  web:\n    image: busybox\n    command: sleep 1000\n    stop_signal: KILL\n'
		cat
	} >compose.yaml
}
# of SERVICE TEMPLATE
of() {
	field "$(docker-compose ps -q "$1")" "$2"
}
