"""Learning while serving: inputs are recorded, exits are compiled from them, and served.

Apparate (3.1) and PAME (6.2) train and choose exits on recorded requests. Here the server records
the requests: :mod:`.input_recorder` keeps a uniform sample of the requests (:mod:`.reservoir`) in a
file (:mod:`.recording_file`), :mod:`.lifecycle` decides when to compile, switch and restart, and
:mod:`.learner` executes these decisions. :mod:`.recording_file` imports only numpy, because the
compiler reads such files, too.
"""
