#!/bin/bash
# Starts the worker that this machine was rented for, and shuts the machine down afterwards. For Amazon Linux
# 2023. An image that already has Docker and the worker's image starts in a third of the time.
#
# Job and worker are in the machine's tags. The machine's role reads the rest from Systems Manager's parameters:
#   /doll/worker/image                         the image
#   /doll/worker/settings/DOLL_KAFKA           a variable, one parameter each
#   /doll/worker/secrets/DOLL_REDIS_PASSWORD   content of the file in DOLL_REDIS_PASSWORD_FILE
#   /doll/worker/files/ca.pem                  a file in /run/secrets
set -euo pipefail

readonly metadata=http://169.254.169.254/latest
readonly work=/run/doll # in memory
readonly cloud=/var/lib/cloud

# A machine without work costs money, so it shuts down whatever the reason. It waits 180 s: EC2 takes a preempted
# machine at most 120 s after the notice, and an earlier shutdown would count as a failure, not a preemption.
end() {
  sleep 180
  shutdown -h now
}
trap end EXIT

token=$(curl -sf --retry 5 --retry-connrefused -X PUT "$metadata/api/token" \
  -H "X-aws-ec2-metadata-token-ttl-seconds: 300")
tell() { curl -sf --retry 5 "$metadata/meta-data/$1" -H "X-aws-ec2-metadata-token: $token"; }
job=$(tell tags/instance/doll:job)
worker=$(tell tags/instance/doll:worker)
region=$(tell placement/region)
machine=$(tell instance-id)
tier=spot
if [ "$(tell instance-life-cycle)" = on-demand ]; then tier=reliable; fi

# User data runs once, so a machine that EC2 restarts after a host fault would cost money without working. This
# script shuts it down at each later boot, but not another machine made from this one's image.
mkdir -p "$cloud/scripts/per-boot"
cat >"$cloud/scripts/per-boot/doll" <<AGAIN
#!/bin/sh
[ "\$(cat $cloud/data/instance-id)" != "$machine" ] || shutdown -h now
AGAIN
chmod 755 "$cloud/scripts/per-boot/doll"

command -v docker >/dev/null || dnf install -qy docker
command -v aws >/dev/null || dnf install -qy awscli-2
systemctl start docker

mkdir -p "$work/secrets"
aws ssm get-parameters-by-path --region "$region" --path /doll/worker --recursive --with-decryption \
  --output json >"$work/parameters"
python3 - "$work" <<'PYTHON'
import json, os, pathlib, sys

os.umask(0o077)
work = pathlib.Path(sys.argv[1])
variables = []
for each in json.loads((work / "parameters").read_text())["Parameters"]:
    kind, name = each["Name"].split("/")[-2:]
    if kind == "settings":
        variables.append(f"{name}={each['Value']}\n")
    elif kind in ("secrets", "files"):
        (work / "secrets" / name).write_text(each["Value"])
    if kind == "secrets":
        variables.append(f"{name}_FILE=/run/secrets/{name}\n")
    if name == "image":
        (work / "image").write_text(each["Value"])
(work / "environment").write_text("".join(variables))
PYTHON
rm "$work/parameters"
chown -R 10001:10001 "$work/secrets" # the worker's user
image=$(<"$work/image")

registry=${image%%/*}
if [[ $registry == *.dkr.ecr.*.amazonaws.com ]]; then
  aws ecr get-login-password --region "$region" |
    docker login --username AWS --password-stdin "$registry"
fi
gpus=()
if command -v nvidia-smi >/dev/null; then gpus=(--gpus all); fi

# The unit is ordered after Docker's, so that on shutdown the worker leaves before Docker stops. The host's network
# is needed because the metadata service, which has the notices, does not answer a hop away.
systemd-run --unit doll-worker --wait \
  --property After=docker.service --property Requires=docker.service --property TimeoutStopSec=60 \
  docker run --rm --init --name doll-worker --network host \
  --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges "${gpus[@]}" \
  --volume "$work/secrets:/run/secrets:ro" --env-file "$work/environment" \
  --env DOLL_TIER="$tier" --env DOLL_NOTICES=ec2 --env DOLL_METRICS_PORT=9102 --env DOLL_METRICS_HOST=0.0.0.0 \
  "$image" worker --job "$job" --name "$worker"
