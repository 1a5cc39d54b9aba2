{{/* Name of an object: the release and a part. Call with (list . "part"). */}}
{{- define "prfaas.name" -}}
{{- $root := index . 0 -}}
{{- printf "%s-%s" $root.Release.Name (index . 1) | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that select pods of a part. */}}
{{- define "prfaas.selector" -}}
app.kubernetes.io/name: prfaas-{{ index . 1 }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- end -}}

{{/* The same on one line, within braces. */}}
{{- define "prfaas.selectorInline" -}}
{app.kubernetes.io/name: prfaas-{{ index . 1 }}, app.kubernetes.io/instance: {{ (index . 0).Release.Name }}}
{{- end -}}

{{- define "prfaas.labels" -}}
{{ include "prfaas.selector" . }}
app.kubernetes.io/part-of: prfaas
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end -}}

{{- define "prfaas.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end -}}

{{/* Host name of a manager: the name for other datacenters where there is one. Call with (list . number). */}}
{{- define "prfaas.managerHost" -}}
{{- $root := index . 0 -}}
{{- $name := include "prfaas.name" (list $root "manager") -}}
{{- if $root.Values.managers.outside.enabled -}}
{{ $name }}-{{ index . 1 }}.{{ required "managers.outside.domain is missing: write a domain such as west.example" $root.Values.managers.outside.domain }}
{{- else -}}
{{ $name }}-{{ index . 1 }}.{{ $name }}s
{{- end -}}
{{- end -}}

{{/* Addresses of all managers as a JSON list. */}}
{{- define "prfaas.managers" -}}
{{- $root := . -}}
{{- if .Values.managers.enabled -}}
{{- $found := list -}}
{{- range $number := until (int .Values.managers.replicas) -}}
{{- $found = append $found (printf "%s:7410" (include "prfaas.managerHost" (list $root $number))) -}}
{{- end -}}
{{ toJson $found }}
{{- else -}}
{{- if not .Values.managers.addresses }}{{ fail "managers.addresses is missing: with managers.enabled false, write host:port of each manager elsewhere" }}{{ end -}}
{{ toJson .Values.managers.addresses }}
{{- end -}}
{{- end -}}

{{- define "prfaas.redisUrl" -}}
{{- if .Values.redis.url -}}
{{ .Values.redis.url }}
{{- else if not .Values.redis.enabled -}}
{{ fail "redis.url is missing: with redis.enabled false, write a URL such as redis://host:6379/0" }}
{{- else if .Values.tls.enabled -}}
rediss://{{ include "prfaas.name" (list . "redis") }}:6379/0?ssl_ca_certs=/etc/prfaas-tls/ca.crt&ssl_certfile=/etc/prfaas-tls/tls.crt&ssl_keyfile=/etc/prfaas-tls/tls.key
{{- else -}}
redis://{{ include "prfaas.name" (list . "redis") }}:6379/0
{{- end -}}
{{- end -}}

{{/* The setting `tls` of a component, as a mapping. */}}
{{- define "prfaas.tlsSettings" -}}
{{- if .Values.tls.enabled -}}
tls: {authority: /etc/prfaas-tls/ca.crt, certificate: /etc/prfaas-tls/tls.crt, key: /etc/prfaas-tls/tls.key}
{{- end -}}
{{- end -}}

{{- define "prfaas.tlsMount" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/prfaas-tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volume with the certificate of a part. Call with (list . "part"). */}}
{{- define "prfaas.tlsVolume" -}}
{{- if (index . 0).Values.tls.enabled }}
- {name: tls, secret: {secretName: {{ include "prfaas.name" (list (index . 0) (printf "%s-tls" (index . 1))) }}, defaultMode: 0440}}
{{- end }}
{{- end -}}

{{/* Security context of a container that needs no privilege. */}}
{{- define "prfaas.containerSecurity" -}}
securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end -}}
