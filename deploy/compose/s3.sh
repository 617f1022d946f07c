#!/bin/sh
# Starts the S3 server with its clients' key, from a file in boto3's format.
set -eu

value() {
    sed -n "s/^$1 *= *//p" "$S3_CREDENTIALS_FILE"
}

ROOT_ACCESS_KEY=$(value aws_access_key_id)
ROOT_SECRET_KEY=$(value aws_secret_access_key)
[ -n "$ROOT_ACCESS_KEY" ] && [ -n "$ROOT_SECRET_KEY" ] ||
    { echo "$S3_CREDENTIALS_FILE: must contain an access key and a secret key; run make secrets" >&2; exit 1; }
export ROOT_ACCESS_KEY ROOT_SECRET_KEY

exec versitygw --port "${S3_ADDRESS:-:7070}" --health /health --quiet --disable-acl \
    posix "${S3_DIRECTORY:-/data}"
