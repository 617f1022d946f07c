#!/bin/sh
# Makes the bucket, a folder of the S3 server's volume, and gives both to the user it runs as.
set -eu

directory=${S3_DIRECTORY:-/data}
mkdir -p "$directory/$BUCKET"
chown "${S3_USER:-10001:10001}" "$directory" "$directory/$BUCKET"
