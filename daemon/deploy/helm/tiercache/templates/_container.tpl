{{/* The parts that the DaemonSet and a sidecar in another chart have in common. `.` is a chart's root with our values. */}}

{{- define "tiercache.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tiercache.labels" -}}
app.kubernetes.io/name: tiercache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tiercache.nvmeDirs" -}}
{{- $dirs := list }}
{{- if eq .Values.nvme.type "emptyDir" }}
{{- $dirs = list "/nvme/0/tiercache" }}
{{- else }}
{{- range $number, $path := .Values.nvme.paths }}{{ $dirs = append $dirs (printf "/nvme/%d/tiercache" $number) }}{{ end }}
{{- end }}
{{- join "," $dirs }}
{{- end }}

{{- define "tiercache.container" -}}
image: {{ include "tiercache.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [daemon]
env:
  - {name: TIERCACHE_RUN_DIR, value: {{ .runDir | default "/run/tiercache" }}}
  - {name: TIERCACHE_ARENA, value: {{ .Values.arena | quote }}}
  - {name: TIERCACHE_GRACE, value: {{ .Values.grace | quote }}}
  {{- if .Values.nvme.enabled }}
  - {name: TIERCACHE_NVME, value: {{ include "tiercache.nvmeDirs" . | quote }}}
  - {name: TIERCACHE_NVME_SIZE, value: {{ .Values.nvme.size | quote }}}
  {{- end }}
  {{- if .Values.http.enabled }}
  - {name: TIERCACHE_HTTP, value: {{ printf "0.0.0.0:%d" (int .Values.http.port) | quote }}}
  - {name: TIERCACHE_HTTP_ALLOW_REMOTE, value: "yes"}
  {{- end }}
  {{- range $key, $value := .Values.settings }}
  - {name: TIERCACHE_{{ upper $key }}, value: {{ $value | quote }}}
  {{- end }}
{{- if .Values.http.enabled }}
ports:
  - {name: tiercache, containerPort: {{ .Values.http.port }}}
{{- end }}
startupProbe:
  exec: {command: [tiercache, ping]}
  periodSeconds: 1
  failureThreshold: 30
{{- if .Values.http.enabled }}
readinessProbe:
  httpGet: {path: /readyz, port: tiercache}
  periodSeconds: 10
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: tiercache}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- else }}
livenessProbe:
  exec: {command: [tiercache, ping]}
  periodSeconds: 30
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}
resources:
  requests: {cpu: {{ .Values.cpu | quote }}, memory: {{ .Values.arenaMemoryLimit | quote }}}
  limits: {memory: {{ .Values.arenaMemoryLimit | quote }}}
securityContext:
  runAsUser: {{ .Values.user }}
  runAsGroup: {{ .Values.group }}
  runAsNonRoot: {{ ne (int .Values.user) 0 }}
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
{{ include "tiercache.mounts" . }}
{{- end }}

{{- define "tiercache.mounts" -}}
- {name: tiercache-run, mountPath: /run/tiercache}
{{- if .Values.nvme.enabled }}
{{- if eq .Values.nvme.type "emptyDir" }}
- {name: tiercache-nvme-0, mountPath: /nvme/0}
{{- else }}
{{- range $number, $path := .Values.nvme.paths }}
- {name: tiercache-nvme-{{ $number }}, mountPath: /nvme/{{ $number }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tiercache.nvmeVolumes" -}}
{{- if .Values.nvme.enabled }}
{{- if eq .Values.nvme.type "emptyDir" }}
- name: tiercache-nvme-0
  emptyDir: {sizeLimit: {{ .Values.nvme.emptyDirSizeLimit }}}
{{- else }}
{{- range $number, $path := .Values.nvme.paths }}
- name: tiercache-nvme-{{ $number }}
  hostPath: {path: {{ $path | quote }}, type: Directory}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* hostPath directories belong to root: one step as root gives them to the daemon's user. */}}
{{- define "tiercache.own" -}}
name: tiercache-own
image: {{ include "tiercache.image" . | quote }}
command:
  - install
  - --directory
  - --owner={{ .Values.user }}
  - --group={{ .Values.group }}
  - --mode=0700
  - /run/tiercache
  {{- if .Values.nvme.enabled }}
  {{- range splitList "," (include "tiercache.nvmeDirs" .) }}
  - {{ . }}
  {{- end }}
  {{- end }}
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL], add: [CHOWN, FOWNER, DAC_OVERRIDE]}
resources:
  requests: {cpu: 10m, memory: 32Mi}
  limits: {memory: 64Mi}
volumeMounts:
{{ include "tiercache.mounts" . }}
{{- end }}
