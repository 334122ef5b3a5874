"""Extension: text, token by token, with exits at every token (CALM; E3 5.1.3).

Data flows one way: ONNX with past keys and values → ``graphs`` (cut, propagation, heads) →
``training`` (adapters, heads, or a copy with its exits) → ``compiling`` (``eecompile generation``:
exits and thresholds are chosen and certified on the model's own answers, by ``promise``) →
``bundle`` → ``stages`` (ONNX Runtime, caches by slot) ← ``scheduling`` (sans I/O) ← ``serving``
(asyncio; ``eeserve`` serves it next to ordinary models).
"""
