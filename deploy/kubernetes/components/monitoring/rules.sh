#!/bin/sh
# Prints rules.yaml: the alert rules of deploy/prometheus as the Prometheus operator wants them.
#   deploy/kubernetes/components/monitoring/rules.sh > deploy/kubernetes/components/monitoring/rules.yaml
set -eu
case ${1:-} in
    ?*)
        echo "usage: rules.sh, without arguments"
        echo "example: deploy/kubernetes/components/monitoring/rules.sh > deploy/kubernetes/components/monitoring/rules.yaml"
        [ "$1" = --help ] && exit 0 || exit 2
        ;;
esac
cat <<'HEAD'
# Made by rules.sh from deploy/prometheus/alerts.yml: change that, not this.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: doll
  namespace: doll
  labels:
    app.kubernetes.io/name: doll
    app.kubernetes.io/part-of: doll
spec:
HEAD
sed 's/^\(.\)/  \1/' "$(dirname "$0")/../../../prometheus/alerts.yml"
