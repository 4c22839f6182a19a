"""The bundled engine behind an HTTP interface like OpenAI's: `tiercache serve MODEL`.

Needs the extras `engine` and `serve`.

    server ──► app: routes ──► bodies, requests: what clients ask, checked ──► the engine ──► answers, encoding
    private_daemon   a daemon of the server's own         connections, failures, metrics, settings
"""
