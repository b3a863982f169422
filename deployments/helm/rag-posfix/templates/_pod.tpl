{{/* What pods have in common: the service, the Job of the index, the nodes of Ray. */}}
{{- define "rag-posfix.pod" -}}
{{- $v := .Values -}}
serviceAccountName: {{ include "rag-posfix.serviceAccountName" . }}
automountServiceAccountToken: false
# A Service called rag-posfix would otherwise set RAG_POSFIX_SERVICE_HOST and RAG_POSFIX_SERVICE_PORT, which are
# settings: the pod would listen on the address of the Service.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $v.securityContext.runAsUser }}
  runAsGroup: {{ $v.securityContext.runAsGroup }}
  fsGroup: {{ $v.securityContext.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with $v.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Variables from secrets, and further ones. */}}
{{- define "rag-posfix.variables" -}}
{{- $v := .Values -}}
{{- if $v.auth.existingSecret }}
- name: RAG_POSFIX_SERVICE_API_KEY
  valueFrom:
    secretKeyRef: {name: {{ $v.auth.existingSecret }}, key: {{ $v.auth.apiKeyKey }}}
{{- end }}
{{- if $v.redis.existingSecret }}
- name: RAG_POSFIX_CACHE_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ $v.redis.existingSecret }}, key: {{ $v.redis.answersUrlKey }}}
- name: RAG_POSFIX_PASSAGES_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ $v.redis.existingSecret }}, key: {{ $v.redis.passagesUrlKey }}}
{{- end }}
{{- with $v.retrieval.retrieverKey }}
- name: RAG_POSFIX_RETRIEVER
  valueFrom:
    secretKeyRef: {name: {{ $v.retrieval.existingSecret }}, key: {{ . }}}
{{- end }}
{{- with $v.retrieval.collectionStoreKey }}
- name: RAG_POSFIX_SERVICE_COLLECTION_STORE
  valueFrom:
    secretKeyRef: {name: {{ $v.retrieval.existingSecret }}, key: {{ . }}}
{{- end }}
{{- with $v.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The environment of the service: settings, secrets, further variables. */}}
{{- define "rag-posfix.environment" -}}
envFrom:
  - configMapRef:
      name: {{ include "rag-posfix.fullname" . }}
{{- with include "rag-posfix.variables" . | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes of .root; a .job, which writes the index, has no data of tenants. */}}
{{- define "rag-posfix.mounts" -}}
{{- $v := .root.Values -}}
- {name: cache, mountPath: /cache}
{{- if not .job }}
- {name: data, mountPath: /data}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- if gt (int $v.model.tensorParallel) 1 }}
- {name: shared-memory, mountPath: /dev/shm}
{{- end }}
{{- if ne $v.weights.source "fetch" }}
- {name: weights, mountPath: {{ $v.weights.mountPath }}, readOnly: true}
{{- end }}
{{- if include "rag-posfix.indexClaim" .root }}
- name: index
  mountPath: {{ $v.index.mountPath }}
  {{- with $v.index.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: {{ not .job }}
{{- end }}
{{- with $v.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "rag-posfix.volumes" -}}
{{- $v := .root.Values -}}
- name: cache
  {{- if eq $v.cache.volume "ephemeral" }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $v.cache.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $v.cache.size }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $v.cache.size }}
  {{- end }}
{{- if not .job }}
- name: data
  {{- if include "rag-posfix.dataClaim" .root }}
  persistentVolumeClaim: {claimName: {{ include "rag-posfix.dataClaim" .root }}}
  {{- else }}
  emptyDir:
    sizeLimit: 1Gi
  {{- end }}
{{- end }}
- name: tmp
  emptyDir:
    sizeLimit: {{ $v.ray.enabled | ternary "10Gi" "1Gi" }}
{{- if gt (int $v.model.tensorParallel) 1 }}
# What the processes of one pod pass to each other.
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: 2Gi
{{- end }}
{{- if ne $v.weights.source "fetch" }}
- name: weights
  {{- if include "rag-posfix.weightsClaim" .root }}
  persistentVolumeClaim: {claimName: {{ include "rag-posfix.weightsClaim" .root }}{{ if eq $v.weights.source "volume" }}, readOnly: true{{ end }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- with include "rag-posfix.indexClaim" .root }}
- name: index
  persistentVolumeClaim: {claimName: {{ . }}, readOnly: {{ not $.job }}}
{{- end }}
{{- with $v.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Names of claims: named, or made by this chart where a size is given; otherwise empty. */}}
{{- define "rag-posfix.dataClaim" -}}
{{- default (ternary (printf "%s-data" (include "rag-posfix.fullname" .)) "" (not (empty .Values.data.size))) .Values.data.existingClaim -}}
{{- end -}}
{{- define "rag-posfix.indexClaim" -}}
{{- default (ternary (printf "%s-index" (include "rag-posfix.fullname" .)) "" (not (empty .Values.index.size))) .Values.index.existingClaim -}}
{{- end -}}
{{- define "rag-posfix.weightsClaim" -}}
{{- default (ternary (printf "%s-weights" (include "rag-posfix.fullname" .)) "" (not (empty .Values.weights.size))) .Values.weights.existingClaim -}}
{{- end -}}

{{/* What fetches weights before the service starts. It has the settings and weights.env, and no secret of the service. */}}
{{- define "rag-posfix.fetch" -}}
{{- $v := .Values -}}
{{- $commands := list -}}
{{- if eq $v.weights.source "fetch" -}}
{{- $commands = list (concat (list "rag-posfix" "models" "fetch") $v.weights.names) -}}
{{- else if eq $v.weights.source "s3" -}}
{{- $commands = list (list "aws" "s3" "sync" "--no-progress" $v.weights.s3.uri $v.weights.mountPath) -}}
{{- else if eq $v.weights.source "hub" -}}
{{- range $v.weights.hub -}}
{{- $commands = append $commands (list "hf" "download" .repository "--revision" .revision "--local-dir" (printf "%s/%s" $v.weights.mountPath (base .repository))) -}}
{{- end -}}
{{- end -}}
{{- with $commands -}}
initContainers:
  {{- range $number, $command := . }}
  - name: fetch-weights{{ if $number }}-{{ $number }}{{ end }}
    image: {{ eq $v.weights.source "s3" | ternary $v.weights.s3.image (include "rag-posfix.image" $) }}
    imagePullPolicy: {{ $v.image.pullPolicy }}
    command:
      {{- toYaml $command | nindent 6 }}
    envFrom:
      - configMapRef:
          name: {{ include "rag-posfix.fullname" $ }}
    env:
      - {name: HF_HUB_OFFLINE, value: "0"}
      {{- with $v.weights.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    securityContext:
      {{- include "rag-posfix.containerSecurity" $ | nindent 6 }}
    resources:
      requests: {cpu: 500m, memory: {{ $v.weights.memory }}}
      limits: {memory: {{ $v.weights.memory }}}
    volumeMounts:
      - {name: cache, mountPath: /cache}
      - {name: tmp, mountPath: /tmp}
      {{- if ne $v.weights.source "fetch" }}
      - {name: weights, mountPath: {{ $v.weights.mountPath }}}
      {{- end }}
      {{- with $v.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* A claim of this chart: where a size is given and no claim is named. It stays when the release is removed. */}}
{{- define "rag-posfix.claim" -}}
{{- $c := index .root.Values .part -}}
{{- if and $c.size (not $c.existingClaim) }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ include "rag-posfix.fullname" .root }}-{{ .part }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "rag-posfix.labels" .root | nindent 4 }}
  annotations:
    helm.sh/resource-policy: keep
spec:
  accessModes: [{{ $c.accessMode }}]
  {{- with $c.storageClassName }}
  storageClassName: {{ . }}
  {{- end }}
  resources:
    requests:
      storage: {{ $c.size }}
{{- end }}
{{- end -}}

{{/* Name and port of the Service that answers: this chart's, or the one that KubeRay makes. */}}
{{- define "rag-posfix.backendName" -}}
{{ include "rag-posfix.fullname" . }}{{ if .Values.ray.enabled }}-serve-svc{{ end }}
{{- end -}}
{{- define "rag-posfix.backendPort" -}}
{{ .Values.ray.enabled | ternary 8000 .Values.service.port }}
{{- end -}}

{{/* Resources of a container with the model. */}}
{{- define "rag-posfix.resources" -}}
requests:
  {{- toYaml .Values.resources.requests | nindent 2 }}
limits:
  {{- toYaml .Values.resources.limits | nindent 2 }}
  {{- if .Values.gpu.enabled }}
  {{ .Values.gpu.resourceName }}: {{ .Values.gpu.count }}
  {{- end }}
{{- end -}}
