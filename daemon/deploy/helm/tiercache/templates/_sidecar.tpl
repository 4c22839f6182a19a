{{/*
For charts of engines, with this one as a dependency (and `tiercache.daemonSet.enabled: false` in their values):

    initContainers:
      # Only with nvme.keySecret, listen or shared:
      - {{- include "tiercache.keys" .Subcharts.tiercache | nindent 8 }}
      - {{- include "tiercache.sidecar" .Subcharts.tiercache | nindent 8 }}
    containers:
      - name: engine
        env: [{name: TIERCACHE_RUN_DIR, value: /run/tiercache/daemon}]
        volumeMounts: [{name: tiercache-run, mountPath: /run/tiercache}]
    volumes:
      {{- include "tiercache.sidecarVolumes" .Subcharts.tiercache | nindent 6 }}

The engine runs as the same user, or in `socketGroup`, which is one of the pod's supplementalGroups then. Needs Kubernetes 1.29 (a container that is started before the engine, and ended after it).
*/}}
{{- define "tiercache.sidecar" -}}
name: tiercache
restartPolicy: Always
{{- /* An emptyDir belongs to root and all users may write to it: the daemon makes a folder of its own there. */}}
{{ include "tiercache.container" (dict "Values" .Values "Chart" .Chart "runDir" "/run/tiercache/daemon") }}
{{- end }}

{{- define "tiercache.sidecarVolumes" -}}
- name: tiercache-run
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{ include "tiercache.nvmeVolumes" . }}
{{- end }}
