"""Imported once by the fork server of a worker; every rank starts from there in a fraction of a second.

Without garbage collection, which would take a fifth of the time; and no later collection looks through what is
imported, as a trainer's at each entry of a stage would, in which a run of a second would spend a third of its time.
"""

import gc
import importlib

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

gc.disable()
for name in (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torchtitan_cp.training.trainer",
    "torchtitan_cp.runtime.launcher",
    "models.huggingface.model",
    "transformers.models.llama.modeling_llama",
    "torch._dynamo.testing",
    "torch._inductor.compile_fx",
    "torchtitan_cp.cli.evaluate",
    "numpy.ma",
    "hypothesis",
    "pytest",
):
    importlib.import_module(name)
# An agent names the caller in each record of how nodes meet, which nobody reads here: a tenth of a second each.
dynamic_rendezvous.get_method_name = lambda depth=0: ""
gc.freeze()
gc.enable()
