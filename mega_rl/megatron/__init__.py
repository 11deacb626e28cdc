"""The training engine on Megatron-core: the only package that imports ``megatron.*``.

Importing any module of it boots first, since those modules import Megatron-core at their top. A caller could not do it
for them: by the time a function of its own runs, its imports are done.
"""

from mega_rl.megatron import boot

boot.boot()
