"""The folder of `save_pretrained`, of every method; ALBEF's is also tested in `albef/test_folder.py`."""

import pytest
import torch

from support.methods import METHODS
from vlightning.common.errors import UserError
from vlightning.lightning_modules import ALBEFModule, SHReModule


@pytest.mark.parametrize("name", METHODS)
def test_a_module_is_rebuilt_from_its_folder(name, tmp_path):
    method = METHODS[name]
    module, _ = method.build(method.prepare(tmp_path), seed=0)
    module.save_pretrained(tmp_path / "export")
    torch.manual_seed(1)
    loaded = type(module).from_pretrained(tmp_path / "export")
    assert not loaded.training
    state, own = module.pretrained_state(), loaded.pretrained_state()
    assert state.keys() == own.keys()
    assert all(torch.equal(value, own[key]) for key, value in state.items())
    assert not any(key.startswith(method.outside) for key in state if method.outside)


def test_the_folder_of_another_class_is_refused(tmp_path):
    method = METHODS["shre"]
    method.build(method.prepare(tmp_path), seed=0)[0].save_pretrained(tmp_path / "export")
    with pytest.raises(UserError, match=r"Expected an export of ALBEFModule in .* got one of SHReModule"):
        ALBEFModule.from_pretrained(tmp_path / "export")
    with pytest.raises(UserError, match="got one of SHReModule"):
        type("Other", (SHReModule,), {}).from_pretrained(tmp_path / "export")
