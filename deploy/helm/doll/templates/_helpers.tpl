{{/* Metadata of an object. Takes a list: root, name, and optionally the component. */}}
{{- define "doll.metadata" -}}
{{- $root := index . 0 -}}
metadata:
  name: {{ index . 1 }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    {{- include "doll.labels" $root | nindent 4 }}
    {{- with rest (rest .) }}
    app.kubernetes.io/component: {{ first . }}
    {{- end }}
{{- end }}

{{- define "doll.labels" -}}
app.kubernetes.io/name: doll
app.kubernetes.io/part-of: doll
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Selector of a component's pods. */}}
{{- define "doll.selector" -}}
{app.kubernetes.io/name: doll, app.kubernetes.io/component: {{ . }}}
{{- end }}

{{/* Not empty if workers of both tiers run. */}}
{{- define "doll.reliable" -}}
{{- with .Values.worker }}{{ if and .enabled .spot.enabled .reliable.replicas (not .hold) }}yes{{ end }}{{ end -}}
{{- end }}

{{/* Selector of all workers' pods. */}}
{{- define "doll.workers" -}}
matchLabels: {app.kubernetes.io/name: doll}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: In, values: [worker, worker-reliable]}
{{- end }}

{{/* A component: its pods, their service account and their disruption budget. Takes:
     root; name; command: default, the name; image: worker (with PyTorch) or service; values: those of the component;
     tier: tier of a worker's machine; args: arguments after the command; ready: readiness path of its API, if it has
     one; grace: seconds; surge: maxSurge of an update, empty to end the pod before its successor starts; scaled: true
     if an autoscaler sets the replicas; away: maxUnavailable, empty for no budget; hosts: whenUnsatisfiable for two
     pods on a node, empty for a single pod. */}}
{{- define "doll.component" -}}
{{- $market := and (eq .image "service") .root.Values.provisioner.enabled -}}
{{- $spot := and (eq .name "worker") .values.spot.enabled -}}
apiVersion: apps/v1
kind: {{ if .values.hold }}StatefulSet{{ else }}Deployment{{ end }}
{{ include "doll.metadata" (list .root (print "doll-" .name) .name) }}
spec:
  {{- if not .scaled }}
  replicas: {{ default 1 .values.replicas }}
  {{- end }}
  {{- if .values.hold }}
  serviceName: doll-{{ .name }}
  podManagementPolicy: Parallel
  {{- else if .surge }}
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: {{ .surge }}, maxUnavailable: 0}}
  {{- else }}
  strategy: {type: Recreate}
  {{- end }}
  selector:
    matchLabels: {{ include "doll.selector" .name }}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: doll
        app.kubernetes.io/component: {{ .name }}
        app.kubernetes.io/part-of: doll
      # A change of the checksums restarts the pods.
      annotations:
        checksum/settings: {{ toYaml .root.Values.settings | sha256sum }}
        {{- if $market }}
        checksum/market: {{ .root.Values.provisioner.market | sha256sum }}
        {{- end }}
    spec:
      serviceAccountName: doll-{{ .name }}
      automountServiceAccountToken: false
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ .grace }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        seccompProfile: {type: RuntimeDefault}
      {{- if $spot }}
      priorityClassName: doll-worker
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
              - matchExpressions:
                  - {key: {{ .values.spot.label.key }}, operator: In, values: {{ toJson .values.spot.label.values }}}
      {{- end }}
      {{- if or $spot .values.tolerations }}
      tolerations:
        {{- if $spot }}
        - {key: {{ .values.spot.taint }}, operator: Exists, effect: NoSchedule}
        {{- end }}
        {{- with .values.tolerations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- end }}
      {{- if .hosts }}
      topologySpreadConstraints:
        {{- $all := . }}
        {{- range $where := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
        - topologyKey: {{ $where }}
          maxSkew: 1
          whenUnsatisfiable: {{ contains "hostname" $where | ternary $all.hosts "ScheduleAnyway" }}
          labelSelector:
            matchLabels: {{ include "doll.selector" $all.name }}
          {{- if not $all.values.hold }}
          # Only pods of a Deployment have this label.
          matchLabelKeys: [pod-template-hash]
          {{- end }}
        {{- end }}
      {{- end }}
      containers:
        - name: {{ .name }}
          {{- $image := .root.Values.image }}
          image: "{{ $image.registry }}doll-{{ .image }}:{{ default .root.Chart.AppVersion $image.tag }}{{ .values.tagSuffix }}"
          args: {{ concat (list (default .name .command)) (default list .args) (list "--name" "$(POD_NAME)") | toJson }}
          envFrom:
            - configMapRef: {name: doll-settings}
          env:
            - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            {{- with .tier }}
            - {name: DOLL_TIER, value: {{ . }}}
            {{- end }}
            {{- with .values.gpus }}
            - {name: DOLL_GPUS, value: {{ . | quote }}}
            {{- end }}
            {{- if eq .image "worker" }}
            # By default torch uses a thread per core of the node, and would be throttled to the limit.
            - {name: DOLL_THREADS, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}
            {{- end }}
            {{- if .ready }}
            - {name: DOLL_API_HOST, value: 0.0.0.0}
            - {name: DOLL_API_PORT, value: "8080"}
            {{- end }}
            {{- if $market }}
            - {name: DOLL_MARKET, value: /etc/doll/market/market.yaml}
            {{- end }}
          ports:
            {{- if .ready }}
            - {name: api, containerPort: 8080}
            {{- end }}
            - {name: metrics, containerPort: 9102}
          startupProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            httpGet: {path: /healthz, port: metrics}
            periodSeconds: 20
            timeoutSeconds: 5
            failureThreshold: 3
          {{- if .ready }}
          readinessProbe:
            httpGet:
              path: {{ .ready }}
              port: api
              {{- if .root.Values.settings.DOLL_API_TLS_CERT }}
              scheme: HTTPS
              {{- end }}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 3
          # Endpoints are updated a little after SIGTERM, so the API keeps answering for 5 s.
          lifecycle: {preStop: {sleep: {seconds: 5}}}
          {{- end }}
          resources:
            {{- toYaml .values.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities: {drop: [ALL]}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            {{- if $market }}
            - {name: market, mountPath: /etc/doll/market, readOnly: true}
            {{- end }}
            {{- if .root.Values.secrets.name }}
            - {name: secrets, mountPath: /run/secrets/doll, readOnly: true}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {sizeLimit: 1Gi}}
        {{- if $market }}
        - {name: market, configMap: {name: doll-market}}
        {{- end }}
        {{- with .root.Values.secrets }}
        {{- if .name }}
        - name: secrets
          secret:
            secretName: {{ .name }}
            defaultMode: 0440
            items:
              {{- range .keys }}
              - {key: {{ . }}, path: {{ . }}}
              {{- end }}
        {{- end }}
        {{- end }}
---
# Each component has its own account, so that it can have its own role (S3: coordinator, admin). None uses the
# Kubernetes API.
apiVersion: v1
kind: ServiceAccount
{{ include "doll.metadata" (list .root (print "doll-" .name)) }}
  {{- with .values.accountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- if and .away (or .scaled (gt (int .values.replicas) 1)) }}
---
# A component with a single pod has no budget, because its node could never be drained.
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "doll.metadata" (list .root (print "doll-" .name)) }}
spec:
  maxUnavailable: {{ .away }}
  selector:
    matchLabels: {{ include "doll.selector" .name }}
{{- end }}
{{- end }}
