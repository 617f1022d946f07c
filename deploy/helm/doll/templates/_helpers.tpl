{{- define "doll.labels" -}}
app.kubernetes.io/name: doll
app.kubernetes.io/part-of: doll
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "doll.selector" -}}
app.kubernetes.io/name: doll
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* A pod of ours. Wants: root; name; image: worker or service; values: of the component; grace: seconds;
     hosts: what to do where two pods must share a node, empty for one pod; threads, api, market: whether. */}}
{{- define "doll.pod" -}}
metadata:
  labels:
    {{- include "doll.selector" .name | nindent 4 }}
    app.kubernetes.io/part-of: doll
  annotations:
    checksum/settings: {{ toYaml .root.Values.settings | sha256sum }}
    {{- if .market }}
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
    seccompProfile:
      type: RuntimeDefault
  {{- $spot := and (eq .name "worker") .values.spot.enabled }}
  {{- if $spot }}
  priorityClassName: doll-worker
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions:
              - key: {{ .values.spot.label.key }}
                operator: In
                values: {{ toYaml .values.spot.label.values | nindent 18 }}
  {{- end }}
  {{- if or $spot .values.tolerations }}
  tolerations:
    {{- if $spot }}
    - {key: {{ .values.spot.taint }}, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with .values.tolerations }}
    {{- toYaml . | nindent 4 }}
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
        matchLabels:
          {{- include "doll.selector" $all.name | nindent 10 }}
      {{- if not $all.values.hold }}
      matchLabelKeys: [pod-template-hash]
      {{- end }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .name }}
      {{- $image := .root.Values.image }}
      image: "{{ $image.registry }}doll-{{ .image }}:{{ default .root.Chart.AppVersion $image.tag }}{{ .values.tagSuffix }}"
      args: [{{ .name }}, --name, $(POD_NAME)]
      envFrom:
        - configMapRef:
            name: doll-settings
      env:
        {{- with .values.device }}
        - name: DOLL_DEVICE
          value: {{ . }}
        {{- end }}
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- if .threads }}
        - name: DOLL_THREADS
          valueFrom:
            resourceFieldRef:
              resource: limits.cpu
        {{- end }}
        {{- if .api }}
        - name: DOLL_API_HOST
          value: 0.0.0.0
        - name: DOLL_API_PORT
          value: "8080"
        {{- end }}
        {{- if .market }}
        - name: DOLL_MARKET
          value: /etc/doll/market/market.yaml
        {{- end }}
      ports:
        {{- if .api }}
        - name: api
          containerPort: 8080
        {{- end }}
        - name: metrics
          containerPort: 9102
      startupProbe:
        httpGet:
          path: /healthz
          port: metrics
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet:
          path: /healthz
          port: metrics
        periodSeconds: 20
        timeoutSeconds: 5
        failureThreshold: 3
      {{- if .api }}
      readinessProbe:
        httpGet:
          path: /readyz
          port: api
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      lifecycle:
        preStop:
          sleep:
            seconds: 5
      {{- end }}
      resources:
        {{- toYaml .values.resources | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- if .market }}
        - name: market
          mountPath: /etc/doll/market
          readOnly: true
        {{- end }}
        {{- if .root.Values.secrets.name }}
        - name: secrets
          mountPath: /run/secrets/doll
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: 1Gi
    {{- if .market }}
    - name: market
      configMap:
        name: doll-market
    {{- end }}
    {{- with .root.Values.secrets }}
    {{- if .name }}
    - name: secrets
      secret:
        secretName: {{ .name }}
        defaultMode: 288
        items:
          {{- range .keys }}
          - key: {{ . }}
            path: {{ . }}
          {{- end }}
    {{- end }}
    {{- end }}
{{- end }}

{{/* A Deployment. Wants what a pod wants, and: strategy; scaled: whether an autoscaler says how many. */}}
{{- define "doll.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: doll-{{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "doll.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
spec:
  {{- if not .scaled }}
  replicas: {{ default 1 .values.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "doll.selector" .name | nindent 6 }}
  strategy:
    {{- if .surge }}
    type: RollingUpdate
    rollingUpdate:
      maxSurge: {{ .surge }}
      maxUnavailable: 0
    {{- else }}
    type: Recreate
    {{- end }}
  template:
    {{- include "doll.pod" . | nindent 4 }}
{{- end }}

{{/* The account of a component, and what of it may be away while nodes are drained. Wants: root; name; values;
     away: empty for no budget. */}}
{{- define "doll.around" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: doll-{{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "doll.labels" .root | nindent 4 }}
  {{- with .values.accountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- if .away }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: doll-{{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "doll.labels" .root | nindent 4 }}
spec:
  maxUnavailable: {{ .away }}
  selector:
    matchLabels:
      {{- include "doll.selector" .name | nindent 6 }}
{{- end }}
{{- end }}
