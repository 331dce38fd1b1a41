{{- define "vorrang.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{- define "vorrang.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vorrang.labels" -}}
{{ include "vorrang.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "vorrang.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (ternary "cuda" "cpu" .Values.gpu.enabled) }}
{{- end }}

{{- define "vorrang.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "vorrang.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{/* Whether anybody has a credential, and the Secret that says so. */}}
{{- define "vorrang.tenantsSecret" -}}
{{- if .Values.tenants.existingSecret -}}
{{ .Values.tenants.existingSecret }}
{{- else if .Values.tenants.values -}}
{{ include "vorrang.name" . }}-tenants
{{- end -}}
{{- end }}

{{/* Seconds for running requests. */}}
{{- define "vorrang.graceSeconds" -}}
{{ dig "server" "grace_s" 30 .Values.config | float64 | ceil | int }}
{{- end }}

{{/*
Settings as TOML: what the chart decides over what was asked for, over lines of JSON for
the log and, without a card, a KV pool of 1 GiB: the server would take half of what the node has free. Plaintext on all interfaces is said to be
meant, since the metrics' port knows nothing else and the calls' port is inside the cluster.
*/}}
{{- define "vorrang.config" -}}
{{- $server := dict "listen" "0.0.0.0:50051" "insecure" (or (not .Values.tls.secretName) .Values.metrics.enabled) -}}
{{- $owned := dict "server" $server -}}
{{- $control := dict "enabled" .Values.control.enabled -}}
{{- if .Values.control.enabled }}{{ $_ := set $control "listen" "0.0.0.0:50052" }}{{ end -}}
{{- $_ := set $owned "control" $control -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $owned "metrics" (dict "listen" "0.0.0.0:9464") }}{{ end -}}
{{- if .Values.tls.secretName -}}
{{- $tls := dict "certificate" "/etc/vorrang-tls/tls.crt" "private_key" "/etc/vorrang-tls/tls.key" -}}
{{- if .Values.tls.requireClientCertificate }}{{ $_ := set $tls "client_ca" "/etc/vorrang-tls/ca.crt" }}{{ end -}}
{{- $_ := set $owned "tls" $tls -}}
{{- end -}}
{{- if .Values.gpu.enabled -}}
{{- $_ := set $owned "engine" (dict "device" "cuda" "tensor_parallel" (int .Values.gpu.count)) -}}
{{- end -}}
{{- $defaults := dict "log" (dict "format" "json") -}}
{{- if not (or .Values.gpu.enabled (dig "kv" "bytes" nil .Values.config) (dig "kv" "num_blocks" nil .Values.config)) -}}
{{- $_ := set $defaults "kv" (dict "bytes" 1073741824) -}}
{{- end -}}
{{- include "vorrang.toml" (dict "table" (mergeOverwrite $defaults (deepCopy .Values.config) $owned) "path" "") -}}
{{- end }}

{{/* A table as TOML: its values, then its tables. Whole numbers stay whole, which toToml does not care for. */}}
{{- define "vorrang.toml" -}}
{{- range $key, $value := .table }}
{{- if kindIs "map" $value }}
{{- else if kindIs "invalid" $value }}
{{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
{{ $key }} = {{ printf "%.0f" $value }}
{{- else }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- $path := .path }}
{{- range $key, $value := .table }}
{{- if kindIs "map" $value }}
{{- $below := ternary (printf "%s.%s" $path $key) $key (ne $path "") }}
[{{ $below }}]
{{- include "vorrang.toml" (dict "table" $value "path" $below) }}
{{- end }}
{{- end }}
{{- end }}
