#!/bin/sh
# Starts Redis with a password from a file, so that it is in no process list and no environment.
# Arguments are passed on to redis-server.
set -eu

password=$(cat "$REDIS_PASSWORD_FILE")
[ -n "$password" ] || { echo "$REDIS_PASSWORD_FILE is empty: run make secrets" >&2; exit 1; }

# The data may be lost, but a start with it is faster, so a second of it is at risk. A full Redis
# refuses writes instead of evicting what workers wait for. hz 100: with the default of 10, a wait
# ends 100 ms late.
exec redis-server - "$@" <<END
requirepass $password
dir ${REDIS_DIRECTORY:-/data}
save ""
appendonly yes
appendfsync everysec
auto-aof-rewrite-min-size 128mb
maxmemory $REDIS_MAXMEMORY
maxmemory-policy noeviction
hz 100
END
