#!/bin/sh
# Has a job done in a sandbox every now and then. See docs/api.md for the rest of the API, and
# proxy/client for Go.
set -eu

call() { # METHOD PATH BODY
	curl -sS --fail-with-body --max-time 120 -X "$1" -H "Authorization: Bearer $(cat "$BERM_TOKEN_FILE")" \
		-H 'Content-Type: application/json' -d "$3" "$BERM_URL/api/v1/sandboxes/$2"
}

job() {
	# Makes it; one that is there is used again. Its end comes by itself, if nobody ends it.
	call PUT app-job '{"ttl": "10m"}' >/dev/null &&
		answer=$(call POST app-job/exec '{"command": "echo the answer is $((6 * 7))", "timeout": 10}') &&
		echo "$answer" | grep 'the answer is 42' &&
		call DELETE app-job '' >/dev/null
}

while true; do
	if job; then
		touch /tmp/healthy
		sleep 60
	else
		rm -f /tmp/healthy
		sleep 5 # the image may still be on its way
	fi
done
