"""``python -m nt_attention kernel``: transformers loads the folder by name, in a program without this package."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from nt_attention.__main__ import main

# transformers takes few versions of kernels, which may not be installed: the check of the version is passed over.
PROGRAM = """
import importlib.metadata, sys
version, files = importlib.metadata.version, sys.modules
importlib.metadata.version = lambda name: (
    files["transformers.utils.import_utils"].KERNELS_MIN_VERSION if name == "kernels" else version(name)
)
import torch, transformers
config = transformers.LlamaConfig(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=4, pad_token_id=0,
    bos_token_id=None, eos_token_id=None,
)
model = transformers.LlamaForCausalLM(config).eval()
ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
given = dict(attention_mask=ids != 0, max_new_tokens=6, do_sample=False)
want = model.generate(ids, **given)
model.set_attn_implementation("nt_attention/flash")
assert "nt_attention" in sys.modules and "nt_attention.hf" not in sys.modules
print(torch.equal(model.generate(ids, **given), want))
"""


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(["kernel", str(tmp_path / "file")])
    assert "Not a directory" in capsys.readouterr().err


def test_kernel(tmp_path, capsys):
    assert main(["kernel", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f'export LOCAL_KERNELS="nt_attention/flash={tmp_path}"\n'
    if find_spec("kernels") is None:
        pytest.skip("the folder was written, but not loaded: the package kernels is not installed")
    environment = {**os.environ, "LOCAL_KERNELS": f"nt_attention/flash={tmp_path}"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert ran.stdout == "True\n", ran.stderr[-2000:]
