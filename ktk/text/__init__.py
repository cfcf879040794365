"""From a checkpoint to text: what `ktk run`, `ktk chat` and `ktk bench --whole` share.

`place` finds the files of a model, `load` loads it and its tokenizer, `prompt` makes tokens of
words, `generate` makes a reply of tokens, with `stream` for text and times and `interrupt` for
Ctrl-C, and `threads` for what torch computes meanwhile. `report` says how fast that was,
`transcript` keeps a chat, and `run` and `chat` are the commands. transformers computes, with
ktk.transformers for the experts.
"""
