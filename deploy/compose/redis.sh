#!/bin/sh
# Starts Redis with a password from a file, so that it is in no process list and no environment.
# Arguments are passed on to redis-server.
set -eu

password=$(cat "$REDIS_PASSWORD_FILE")
[ -n "$password" ] || { echo "$REDIS_PASSWORD_FILE: must contain a password, got an empty file; run make secrets" >&2; exit 1; }

# DOLL survives the loss of the data, but restarts faster with it. So Redis syncs its log once a second.
# A full Redis refuses writes instead of evicting data that workers wait for. With the default hz of 10,
# blocking reads would time out 100 ms late.
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
