"""Bad steps: a step that is not finite, or whose numbers spike, is noticed on every rank before the optimizer sees it.

`monitor` detects it, `recovery` decides what follows, `diagnosis` names the module, rank and token it begins with,
`replay` runs that module again on one process. The model, the loop and the text come
in as modules, callables and plain values. Imports `config` and `attention` at most.
"""
