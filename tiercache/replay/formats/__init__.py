"""Traces on disk as Requests: one reader for each format, all of them streamed.

mooncake   JSON lines: timestamp (ms), input_length, output_length, hash_ids
bailian    JSON lines: timestamp (s), chat_id, parent_chat_id, input_length, hash_ids of 16 tokens
vllm       JSON lines of batches of KV events, as vLLM and our daemon publish them
recorded   what `tiercache daemon --record` has written
trace      a file in any of these formats; lines: what reading lines has in common
"""
