#!/bin/sh
# Creates the bucket, a folder of the S3 server's volume, and makes the server's user their owner.
set -eu

directory=${S3_DIRECTORY:-/data}
mkdir -p "$directory/$BUCKET"
chown "${S3_USER:-10001:10001}" "$directory" "$directory/$BUCKET"
