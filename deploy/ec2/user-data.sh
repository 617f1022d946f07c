#!/bin/bash
# Starts the worker that this machine was rented for, and ends the machine after it. For Amazon Linux 2023;
# an image that has Docker and the worker's image already starts in a third of the time.
#
# The order is in the machine's tags. The rest is in Systems Manager's parameters, read by its role:
#   /doll/worker/image                         the image
#   /doll/worker/settings/DOLL_KAFKA           a variable, and so on for the others
#   /doll/worker/secrets/DOLL_REDIS_PASSWORD   what DOLL_REDIS_PASSWORD_FILE shall hold
#   /doll/worker/files/ca.pem                  a file in /run/secrets
set -euo pipefail

readonly metadata=http://169.254.169.254/latest
readonly work=/run/doll # in memory, and gone with the machine
readonly cloud=/var/lib/cloud

# Nobody pays for a machine that does nothing, whatever the reason. But not at once: one that switches itself
# off before EC2 takes it, at most 120 s after the notice, would count as failed and not as preempted.
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

# User data runs once: a machine that EC2 starts anew after a fault of its host would do nothing and cost. It
# ends then; another one that was made from this one's image does not.
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

# A unit after Docker's, so that a machine that is given back lets the worker leave before Docker ends. The
# host's network: metadata, where notices are, answers no one who is a hop away.
systemd-run --unit doll-worker --wait \
  --property After=docker.service --property Requires=docker.service --property TimeoutStopSec=60 \
  docker run --rm --init --name doll-worker --network host \
  --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges "${gpus[@]}" \
  --volume "$work/secrets:/run/secrets:ro" --env-file "$work/environment" \
  --env DOLL_TIER="$tier" --env DOLL_NOTICES=ec2 --env DOLL_METRICS_PORT=9102 --env DOLL_METRICS_HOST=0.0.0.0 \
  "$image" worker --job "$job" --name "$worker"
