"""A model as it is, as a bundle of one segment without exits: made without data, in seconds.

::

    wrap        the steps, from the file to the bundle
    reading     the reader: as that of compiling, without what only exits need
    rows        whether samples may share a batch, found on made inputs
    trial       the graph as it is served: compared with the file, timed
    command     ``eecompile wrap``
"""
