"""The ops' derivatives and their rules for mapped dimensions: a ``Formulas`` of ``deformc._transforms`` for each."""
