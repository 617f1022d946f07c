#!/bin/sh
# Starts Redis with a password from a file: it stands in no list of processes and no environment.
# Options of redis-server may follow.
set -eu

password=$(cat "$REDIS_PASSWORD_FILE")
[ -n "$password" ] || { echo "$REDIS_PASSWORD_FILE is empty: run make secrets" >&2; exit 1; }

# What Redis holds may vanish, but a start with it is quicker: a second of it may be lost. It refuses
# writes when it is full, instead of dropping what workers wait for. 100 looks at its clock a second:
# at the default 10, a wait ends 100 ms late.
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
