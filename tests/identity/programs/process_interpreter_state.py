"""Prints the visible state of the interpreter, which must be the same as without cbtop."""

import builtins
import gc
import locale
import os
import resource
import sys
import threading

import small
import torch
from small import IDS, Net, show

model = Net().eval()
with torch.no_grad():
    for step in range(6):
        show(step, model(IDS))
        print(sys.getswitchinterval(), sys.gettrace(), sys.getprofile(), gc.get_threshold(), gc.isenabled())
        print(sys.displayhook is sys.__displayhook__, sys.excepthook is sys.__excepthook__, threading.gettrace())
        print(sorted(name for name in sys.modules if name.startswith(("small", "__main__"))), sys.path[0] != "")
        print(builtins.__import__.__name__, sorted(vars(builtins)), os.getcwd() == os.environ.get("PWD", os.getcwd()))
        print(
            torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.backends.mkldnn.enabled
        )
        print(resource.getrlimit(resource.RLIMIT_NOFILE), locale.getlocale(), os.umask(0o22) == 0o22, os.nice(0))
        print(threading.current_thread() is threading.main_thread(), threading.stack_size(), sys.stdin.read())
        print(sorted(vars(small)), sys.orig_argv[-1] == sys.argv[0], sys.warnoptions, sys.get_asyncgen_hooks())
