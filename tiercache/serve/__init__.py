"""The bundled engine behind an OpenAI-compatible HTTP interface: `tiercache serve MODEL`.

Needs the extras `engine` and `serve`.

    server ──► app: routes, bodies ──► requests: what clients ask, checked ──► the engine ──► answers, encoding
    private_daemon   a daemon of the server's own         failures, metrics, settings
"""
