"""The bundled engine behind an HTTP interface like OpenAI's: `tiercache serve MODEL`.

Needs the extras `engine` and `serve`.
"""
