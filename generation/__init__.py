"""Extension: text, token by token, with exits at every token (CALM; E3 5.1.3).

Data flows one way: an ONNX export with past keys and values → ``graphs`` (cut, propagation, heads)
→ ``bundle`` → ``stages`` (ONNX Runtime, caches by slot) ← ``scheduling`` (sans I/O) ← ``serving``
(asyncio, and the engine of the server). ``compiling`` joins them to ``eecompile MODEL --task
generation``: the model answers prompts itself, ``training`` trains exits on its answers, and
``promise`` certifies thresholds.
"""
