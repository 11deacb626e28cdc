"""What a model is, and whether it fits: read from its Hugging Face config.json, without torch.

``shape`` is the only reader of config.json and has the table of families, ``fit`` answers every question whether a
model, a layout and a number of processes go together, ``files`` knows what a model directory holds.

``ModelShape`` describes the decoder and nothing besides. A second part of a model, such as a vision tower, becomes a
module of its own here (its sizes, its reader, its part of ``fit``), named by its family's row; what the checkpoint's
names of the decoder's tensors begin with is ``Family.decoder``. A head that is no output layer, such as one that gives
a value, is not in config.json: whoever trains asks for it, so it belongs to the trainer's description, not here.
"""
