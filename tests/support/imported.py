"""Imported once by the fork server of a worker; every rank starts from there in a fraction of a second.

Without garbage collection, which would take a fifth of the time; and no later collection looks through what is
imported, as a trainer's at each entry of a stage would, in which a run of a second would spend a third of its time.
"""

import gc
import importlib

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
gc.freeze()
gc.enable()
