"""Extension: text, token by token, with exits at every token (CALM; E3 5.1.3). Being built.

Data flows one way: ONNX with past keys and values → ``graphs`` (cut, propagation, heads) →
``bundle`` → ``stages`` (ONNX Runtime, caches by slot) ← ``scheduling`` (sans I/O) ← ``serving``
(asyncio; ``eeserve`` beside ordinary models).
``promise`` has the two promises and certifies thresholds. What is there is tested. To come:

* ``compiling``: ``eecompile --task generation``. Prompts are answered by the model itself; one pass
  over its outputs gives every exit's token and confidence (:class:`.TextRecords`), from which
  adapters learn, exits and thresholds are chosen and certified; which of propagation and catch-up
  is used follows from what it nets.
* The example (``tools/zoo/text_normaliser.py`` makes it), and measurements against the model in the
  same engine, batches that shrink, and decoders of fewer layers.
"""
