{{/* The parts that the DaemonSet and a sidecar in another chart have in common. `.` is a chart's root with our values. */}}

{{- define "tiercache.image" -}}
{{ .Values.image.repository }}
{{- if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "tiercache.selectorLabels" -}}
app.kubernetes.io/name: tiercache
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tiercache.labels" -}}
{{ include "tiercache.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{/* A value as the environment has it. Numbers of YAML are floats here: without this 1000000000 would be 1e+09. */}}
{{- define "tiercache.text" -}}
{{- if kindIs "map" . }}
{{- $pairs := list }}
{{- range $name, $value := . }}{{ $pairs = append $pairs (printf "%s=%s" $name (include "tiercache.text" $value)) }}{{ end }}
{{- join "," $pairs }}
{{- else if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%.0f" . }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{/* Bytes of a size, the daemon's (32GiB, 34359738368) or Kubernetes' (34Gi). */}}
{{- define "tiercache.bytes" -}}
{{- $text := include "tiercache.text" . | nospace | lower }}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text }}
{{- $units := dict "" 1 "b" 1 "k" 1024 "ki" 1024 "kib" 1024 "kb" 1000 }}
{{- $_ := merge $units (dict "m" 1048576 "mi" 1048576 "mib" 1048576 "mb" 1000000) }}
{{- $_ := merge $units (dict "g" 1073741824 "gi" 1073741824 "gib" 1073741824 "gb" 1000000000) }}
{{- $_ := merge $units (dict "t" 1099511627776 "ti" 1099511627776 "tib" 1099511627776 "tb" 1000000000000) }}
{{- printf "%.0f" (mulf (float64 $number) (get $units (trimPrefix $number $text))) }}
{{- end }}

{{/* Seconds of a duration: 20s, 2min, 0.5. */}}
{{- define "tiercache.seconds" -}}
{{- $text := include "tiercache.text" . | nospace | lower }}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text }}
{{- $units := dict "" 1 "s" 1 "us" 0.000001 "ms" 0.001 "m" 60 "min" 60 "h" 3600 "d" 86400 }}
{{- printf "%.3f" (mulf (float64 $number) (get $units (trimPrefix $number $text))) }}
{{- end }}

{{/* Memory of the container: the arena is shared memory that the daemon fills, so all of it counts. */}}
{{- define "tiercache.memory" -}}
{{- $arena := include "tiercache.bytes" .Values.arena | float64 }}
{{- $workers := mulf (include "tiercache.workers" . | int) (addf 33554432 (divf $arena 512)) }}
{{- $folder := include "tiercache.folder" . | float64 }}
{{- $least := addf $arena 67108864 (ternary 67108864 0 .Values.http.enabled) $folder $workers }}
{{- if .Values.arenaMemoryLimit }}
{{- if lt (include "tiercache.bytes" .Values.arenaMemoryLimit | float64) $least }}
{{- fail (printf "arenaMemoryLimit %s is too little for an arena of %s, which counts for the container: leave it empty, or give %.0fMi at least" .Values.arenaMemoryLimit (include "tiercache.text" .Values.arena) (ceil (divf $least 1048576))) }}
{{- end }}
{{- .Values.arenaMemoryLimit }}
{{- else }}
{{- $nvme := 0.0 }}
{{- if .Values.nvme.enabled }}
{{- $nvme = include "tiercache.bytes" .Values.nvme.size | float64 }}
{{- range .Values.nvme.paths }}
{{- with include "tiercache.sizeOf" . }}{{ $nvme = addf $nvme (include "tiercache.bytes" . | float64) }}{{ end }}
{{- end }}
{{- end }}
{{- $overhead := addf 268435456 (divf (addf $arena $nvme) 2000) }}
{{- $overhead = addf $overhead $workers (maxf 0 (subf $folder 100663296)) }}
{{- if .Values.memoryOverhead }}
{{- $overhead = include "tiercache.bytes" .Values.memoryOverhead | float64 }}
{{- if lt (addf $arena $overhead) $least }}
{{- fail (printf "memoryOverhead %s is too little: leave it empty, or give %.0fMi at least" .Values.memoryOverhead (ceil (divf (subf $least $arena) 1048576))) }}
{{- end }}
{{- end }}
{{- printf "%.0fMi" (ceil (divf (addf $arena $overhead) 1048576)) }}
{{- end }}
{{- end }}

{{/* Bytes of the helper process of a shared folder; whether the URL in a Secret names one is not known here. */}}
{{- define "tiercache.folder" -}}
{{- if and .Values.shared.enabled (hasPrefix "file:" .Values.shared.url) }}
{{- $connections := regexFind "[?&]connections=[0-9]+" .Values.shared.url | regexFind "[0-9]+$" | default "4" | float64 }}
{{- printf "%.0f" (addf 33554432 (mulf $connections 16777216)) }}
{{- else }}0
{{- end }}
{{- end }}

{{/* How many worker processes the daemon may have: whether a node has cores for them is not known here. */}}
{{- define "tiercache.workers" -}}
{{- $count := splitList "," (include "tiercache.nvmeDirs" .) | len }}
{{- $wanted := get .Values.settings "nvme_workers" | toString }}
{{- if not .Values.nvme.enabled }}0
{{- else if or (eq $wanted "on") (eq $wanted "true") }}{{ $count }}
{{- else if and (has $wanted (list "" "auto" "<nil>")) (ge $count 2) }}{{ $count }}
{{- else }}0
{{- end }}
{{- end }}

{{/* The size behind a path of the node, as in /mnt/nvme0:2TiB; empty where it has none. */}}
{{- define "tiercache.sizeOf" -}}
{{- regexFind ":[0-9.]+ *[KMGTkmgt]([Ii]?[Bb])?$" . | trimPrefix ":" }}
{{- end }}

{{- define "tiercache.pathOf" -}}
{{- $size := include "tiercache.sizeOf" . }}
{{- if $size }}{{ trimSuffix (printf ":%s" $size) . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* The directories in the container, without their sizes. */}}
{{- define "tiercache.nvmeDirs" -}}
{{- $dirs := list }}
{{- if eq .Values.nvme.type "emptyDir" }}
{{- $dirs = list "/nvme/0/tiercache" }}
{{- else }}
{{- range $number, $path := .Values.nvme.paths }}{{ $dirs = append $dirs (printf "/nvme/%d/tiercache" $number) }}{{ end }}
{{- end }}
{{- join "," $dirs }}
{{- end }}

{{/* The same as the setting `nvme` has them. */}}
{{- define "tiercache.nvmeSetting" -}}
{{- $dirs := splitList "," (include "tiercache.nvmeDirs" .) }}
{{- if ne .Values.nvme.type "emptyDir" }}
{{- $sized := list }}
{{- range $number, $path := .Values.nvme.paths }}
{{- $size := include "tiercache.sizeOf" $path }}
{{- $sized = append $sized (printf "%s%s" (index $dirs $number) (ternary (printf ":%s" $size) "" (ne $size ""))) }}
{{- end }}
{{- $dirs = $sized }}
{{- end }}
{{- join "," $dirs }}
{{- end }}

{{/* Whether there are secrets to be copied for the daemon: not empty if so. */}}
{{- define "tiercache.hasKeys" -}}
{{- if and .Values.listen.enabled (not (and .Values.listen.serverKeySecret .Values.listen.clientKeysConfigMap)) }}
{{- fail "listen.enabled needs listen.serverKeySecret and listen.clientKeysConfigMap: other hosts connect with keys or not at all (tiercache keygen)" }}
{{- end }}
{{- if or .Values.listen.enabled (and .Values.nvme.enabled .Values.nvme.keySecret.name) (include "tiercache.hasSharedKey" .) }}yes{{ end }}
{{- end }}

{{/* Whether blocks in the shared store are encrypted: not empty if so. */}}
{{- define "tiercache.hasSharedKey" -}}
{{- if .Values.shared.enabled }}
{{- if not (or .Values.shared.existingSecret .Values.shared.url) }}
{{- fail "shared.enabled needs the URL of a store: shared.existingSecret, or shared.url if there is no password in it" }}
{{- end }}
{{- if and .Values.shared.url (regexMatch "://.*@" .Values.shared.url) }}
{{- fail "shared.url has a password or a user: put it into the Secret that shared.existingSecret names" }}
{{- end }}
{{- if not (or .Values.shared.existingSecret .Values.shared.plain) }}
{{- fail "shared.enabled needs the key that encrypts blocks: shared.existingSecret with shared.key (openssl rand -hex 32), or shared.plain: true for a store that strangers cannot reach" }}
{{- end }}
{{- if not .Values.shared.plain }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "tiercache.container" -}}
image: {{ include "tiercache.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args: [daemon]
env:
  - {name: TIERCACHE_RUN_DIR, value: {{ .runDir | default "/run/tiercache" | quote }}}
  - {name: TIERCACHE_ARENA, value: {{ include "tiercache.text" .Values.arena | quote }}}
  - {name: TIERCACHE_GRACE, value: {{ include "tiercache.text" .Values.grace | quote }}}
  {{- if .Values.socketGroup }}
  - {name: TIERCACHE_GROUP, value: {{ include "tiercache.text" .Values.socketGroup | quote }}}
  {{- end }}
  {{- if .Values.nvme.enabled }}
  - {name: TIERCACHE_NVME, value: {{ include "tiercache.nvmeSetting" . | quote }}}
  - {name: TIERCACHE_NVME_SIZE, value: {{ include "tiercache.text" .Values.nvme.size | quote }}}
  {{- if .Values.nvme.keySecret.name }}
  - {name: TIERCACHE_NVME_KEY, value: /keys/nvme.key}
  {{- end }}
  {{- end }}
  {{- if .Values.shared.enabled }}
  {{- if .Values.shared.url }}
  - {name: TIERCACHE_SHARED, value: {{ .Values.shared.url | quote }}}
  {{- else }}
  - name: TIERCACHE_SHARED
    valueFrom:
      secretKeyRef: {name: {{ .Values.shared.existingSecret | quote }}, key: {{ .Values.shared.urlKey | quote }}}
  {{- end }}
  {{- if include "tiercache.hasSharedKey" . }}
  - {name: TIERCACHE_SHARED_KEY, value: /keys/shared.key}
  {{- else }}
  - {name: TIERCACHE_SHARED_PLAIN, value: "yes"}
  {{- end }}
  - {name: TIERCACHE_SHARED_DEPLOYMENT, value: {{ .Values.shared.deployment | quote }}}
  - {name: TIERCACHE_SHARED_LOOKUP_TIMEOUT, value: {{ include "tiercache.text" .Values.shared.lookupTimeout | quote }}}
  {{- if not .runDir }}
  - {name: TIERCACHE_SHARED_STATE, value: /shared-state}
  {{- end }}
  {{- end }}
  {{- if .Values.listen.enabled }}
  - {name: TIERCACHE_LISTEN, value: {{ printf "tcp://0.0.0.0:%d" (int64 .Values.listen.port) | quote }}}
  - {name: TIERCACHE_CURVE_KEYS, value: /keys/curve}
  {{- end }}
  {{- if .Values.http.enabled }}
  - {name: TIERCACHE_HTTP, value: {{ printf "0.0.0.0:%d" (int64 .Values.http.port) | quote }}}
  - {name: TIERCACHE_HTTP_ALLOW_REMOTE, value: "yes"}
  {{- end }}
  {{- range $key, $value := .Values.settings }}
  - {name: TIERCACHE_{{ upper $key }}, value: {{ include "tiercache.text" $value | quote }}}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if and .Values.shared.enabled .Values.shared.credentialsSecret }}
envFrom:
  - secretRef: {name: {{ .Values.shared.credentialsSecret | quote }}}
{{- end }}
{{- if or .Values.http.enabled .Values.listen.enabled }}
ports:
  {{- if .Values.http.enabled }}
  - {name: tiercache, containerPort: {{ int64 .Values.http.port }}}
  {{- end }}
  {{- if .Values.listen.enabled }}
  - {name: tiercache-tcp, containerPort: {{ int64 .Values.listen.port }}{{ with .Values.listen.hostPort }}, hostPort: {{ int64 . }}{{ end }}}
  {{- end }}
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
  requests: {cpu: {{ .Values.cpu | quote }}, memory: {{ include "tiercache.memory" . | quote }}}
  limits: {memory: {{ include "tiercache.memory" . | quote }}}
securityContext:
  {{- include "tiercache.securityContext" . | nindent 2 }}
volumeMounts:
{{ include "tiercache.mounts" . }}
{{- if and .Values.shared.enabled (not .runDir) }}
- {name: tiercache-shared-state, mountPath: /shared-state}
{{- end }}
{{- if include "tiercache.hasKeys" . }}
- {name: tiercache-keys, mountPath: /keys}
{{- end }}
{{- if .Values.listen.enabled }}
- {name: tiercache-clients, mountPath: /keys/curve/clients, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "tiercache.securityContext" -}}
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.group }}
runAsNonRoot: {{ ne (int64 .Values.user) 0 }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
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
  emptyDir: {sizeLimit: {{ .Values.nvme.emptyDirSizeLimit | quote }}}
{{- else }}
{{- range $number, $path := .Values.nvme.paths }}
- name: tiercache-nvme-{{ $number }}
  hostPath: {path: {{ include "tiercache.pathOf" $path | quote }}, type: Directory}
{{- end }}
{{- end }}
{{- end }}
{{- if include "tiercache.hasKeys" . }}
- name: tiercache-keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- if and .Values.nvme.enabled .Values.nvme.keySecret.name }}
- name: tiercache-nvme-key
  secret:
    secretName: {{ .Values.nvme.keySecret.name | quote }}
    items: [{key: {{ .Values.nvme.keySecret.key | quote }}, path: nvme.key}]
{{- end }}
{{- if include "tiercache.hasSharedKey" . }}
- name: tiercache-shared-key
  secret:
    secretName: {{ .Values.shared.existingSecret | quote }}
    items: [{key: {{ .Values.shared.keyKey | quote }}, path: shared.key}]
{{- end }}
{{- if .Values.listen.enabled }}
- name: tiercache-server-key
  secret:
    secretName: {{ .Values.listen.serverKeySecret | quote }}
    items: [{key: server.toml, path: server.toml}]
- name: tiercache-clients
  configMap: {name: {{ .Values.listen.clientKeysConfigMap | quote }}}
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Files of a Secret are root's and others may read them; the daemon takes keys that are its own alone. */}}
{{- define "tiercache.keys" -}}
name: tiercache-keys
image: {{ include "tiercache.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command:
  - sh
  - -euc
  - |
    umask 077
    {{- if and .Values.nvme.enabled .Values.nvme.keySecret.name }}
    cp /secrets/nvme/nvme.key /keys/nvme.key
    {{- end }}
    {{- if include "tiercache.hasSharedKey" . }}
    cp /secrets/shared/shared.key /keys/shared.key
    {{- end }}
    {{- if .Values.listen.enabled }}
    mkdir -p /keys/curve/clients
    cp /secrets/server/server.toml /keys/curve/server.toml
    {{- end }}
securityContext:
  {{- include "tiercache.securityContext" . | nindent 2 }}
resources:
  requests: {cpu: 10m, memory: 32Mi}
  limits: {memory: 64Mi}
volumeMounts:
- {name: tiercache-keys, mountPath: /keys}
{{- if and .Values.nvme.enabled .Values.nvme.keySecret.name }}
- {name: tiercache-nvme-key, mountPath: /secrets/nvme, readOnly: true}
{{- end }}
{{- if include "tiercache.hasSharedKey" . }}
- {name: tiercache-shared-key, mountPath: /secrets/shared, readOnly: true}
{{- end }}
{{- if .Values.listen.enabled }}
- {name: tiercache-server-key, mountPath: /secrets/server, readOnly: true}
{{- end }}
{{- end }}

{{/* hostPath directories belong to root: one step as root gives them to the daemon's user. */}}
{{- define "tiercache.own" -}}
name: tiercache-own
image: {{ include "tiercache.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command:
  - install
  - --directory
  - --owner={{ int64 .Values.user }}
  - --group={{ int64 .Values.group }}
  - --mode=0700
  - /run/tiercache
  {{- if .Values.nvme.enabled }}
  {{- range splitList "," (include "tiercache.nvmeDirs" .) }}
  - {{ . }}
  {{- end }}
  {{- end }}
  {{- if .Values.shared.enabled }}
  - /shared-state
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
{{- if .Values.shared.enabled }}
- {name: tiercache-shared-state, mountPath: /shared-state}
{{- end }}
{{- end }}
