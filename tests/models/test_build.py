"""Our flat models against torchvision's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

from bench.errors import UserError
from bench.factors import Model
from models.build import build_model
from models.describe import RESNETS, VGGS, describe, shipped
from models.table import TABLES, layer_table, read_table, shipped_name

BIG = {"resnet101", "resnet152"}


def flat(name: str, granularity: str, num_classes: int = 10, seed: int = 0, **options: int) -> nn.Sequential:
    family = "resnet" if name in RESNETS else "vgg"
    model = Model(name=name, target=f"models.{family}.{name}", options=tuple(options.items()))
    return build_model(model, granularity=granularity, num_classes=num_classes, seed=seed, dtype=torch.float32)


def without_dropout(net: nn.Module) -> nn.Module:
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def copy_state(source: nn.Module, target: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Load by the order of execution of parametric leaves; returns the pairs of parameters."""
    if len(list(source.parameters())) != len(list(target.parameters())):
        raise AssertionError("other parameters")
    ours = dict(target.named_modules())
    order: list[nn.Module] = []
    handles = [m.register_forward_hook(lambda m, *_: order.append(m)) for m in source.modules() if _leaf(m)]
    theirs_in_order = _executed(source, order, handles)
    order2: list[nn.Module] = []
    handles = [m.register_forward_hook(lambda m, *_: order2.append(m)) for m in ours.values() if _leaf(m)]
    ours_in_order = _executed(target, order2, handles)
    pairs = []
    for a, b in zip(theirs_in_order, ours_in_order, strict=True):
        b.load_state_dict(a.state_dict())
        pairs += list(zip(a.parameters(), b.parameters(), strict=True))
    return pairs


def _leaf(module: nn.Module) -> bool:
    return not list(module.children()) and bool(list(module.parameters()))


def _executed(net: nn.Module, order: list[nn.Module], handles: list[object]) -> list[nn.Module]:
    with torch.no_grad():
        net.eval()(torch.zeros(1, 3, 64, 64))
        net.train()
    for handle in handles:
        handle.remove()  # type: ignore[attr-defined]
    return order


@pytest.mark.parametrize("granularity", ["block", "op"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in BIG else ()) for n in RESNETS])
def test_a_resnet_equals_torchvisions_exactly(name: str, granularity: str) -> None:
    theirs = getattr(torchvision.models, name)(num_classes=10)
    ours = flat(name, granularity)
    # The downsample runs before or after the main path; both sides run it at the same place.
    theirs_state, ours_state = list(theirs.state_dict().values()), list(ours.state_dict().values())
    assert sum(t.numel() for t in theirs_state) == sum(t.numel() for t in ours_state)
    pairs = copy_state(theirs, ours)
    x = torch.randn(2, 3, 64, 64)
    expected, found = theirs(x), ours(x)
    assert torch.equal(expected, found)
    expected.square().sum().backward()
    found.square().sum().backward()
    for a, b in pairs:
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("granularity", ["block", "op"])
@pytest.mark.parametrize("name", VGGS)
def test_a_vggs_features_equal_torchvisions_exactly(name: str, granularity: str) -> None:
    """The classifier of 120 M parameters is compared in the slow test; here it is a copy of ours."""
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)(num_classes=10)
    theirs.classifier = nn.Identity()
    theirs = theirs.to_empty(device="cpu")
    ours = without_dropout(flat(name, granularity, hidden=8))
    features = nn.Sequential(*[m for m in _operations(ours) if not isinstance(m, nn.Linear | nn.Dropout)][:-2])
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(0, 0.05)
    pairs = copy_state(theirs, features)
    x = torch.randn(2, 3, 64, 64)
    expected, found = theirs(x), features(x)
    assert torch.equal(expected, found)
    expected.square().sum().backward()
    found.square().sum().backward()
    for a, b in pairs:
        assert torch.equal(a.grad, b.grad)


def _operations(model: nn.Sequential) -> list[nn.Module]:
    return [op for layer in model for op in (layer if isinstance(layer, nn.Sequential) else [layer])]


@pytest.mark.slow
def test_a_whole_vgg_equals_torchvisions_exactly() -> None:
    theirs = without_dropout(torchvision.models.vgg11(num_classes=10))
    ours = without_dropout(flat("vgg11", "op", hidden=4096))
    pairs = copy_state(theirs, ours)
    x = torch.randn(2, 3, 64, 64)
    expected, found = theirs(x), ours(x)
    assert torch.equal(expected, found)
    expected.sum().backward()
    found.sum().backward()
    for a, b in pairs:
        assert torch.equal(a.grad, b.grad)


def test_vgg_weights_are_drawn_as_torchvision_draws_them() -> None:
    ours, theirs = flat("vgg11_bn", "op", hidden=64), torchvision.models.vgg11_bn(num_classes=10)
    for a, b in zip(
        [m for m in ours if isinstance(m, nn.Conv2d)],
        [m for m in theirs.features if isinstance(m, nn.Conv2d)],
        strict=True,
    ):
        assert a.weight.std().item() == pytest.approx(b.weight.std().item(), rel=0.1)
        assert not a.bias.any()
    norms = [m for m in ours if isinstance(m, nn.BatchNorm2d)]
    assert all(m.weight.eq(1).all() and m.bias.eq(0).all() and m.running_var.eq(1).all() for m in norms)
    linear = next(m for m in ours if isinstance(m, nn.Linear))
    assert linear.weight.std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(("name", "options"), [("resnet18", {}), ("resnet50", {}), ("vgg11_bn", {"hidden": 8})])
@pytest.mark.parametrize("granularity", ["block", "op"])
def test_only_tensors_cross_a_boundary_and_no_layer_works_in_place(
    name: str, options: dict[str, int], granularity: str
) -> None:
    model = flat(name, granularity, **options)
    x: object = torch.randn(2, 3, 64, 64)
    for layer in model:
        assert not getattr(layer, "inplace", False)
        before = [t.clone() for t in (x if isinstance(x, tuple) else (x,))]
        after = layer(x)
        for old, new in zip(before, x if isinstance(x, tuple) else (x,), strict=True):
            assert torch.equal(old, new), "a layer has overwritten its input"
        tensors = after if isinstance(after, tuple) else (after,)
        assert all(isinstance(t, torch.Tensor) for t in tensors)
        x = tuple(t.detach() for t in tensors) if isinstance(after, tuple) else after.detach()
    assert isinstance(x, torch.Tensor)
    assert x.shape == (2, 10)


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, third = flat("resnet18", "block"), flat("resnet18", "block"), flat("resnet18", "block", seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first[0].weight, third[0].weight)


@pytest.mark.parametrize(
    ("model", "granularity"),
    [
        pytest.param(
            m, g, id=shipped_name(m, g, 1000), marks=pytest.mark.slow if m.name not in ("resnet18", "vgg11") else ()
        )
        for m, g in shipped()
        if ("hidden", 4096) not in m.options
    ],
)
def test_a_shipped_table_tells_the_truth(model: Model, granularity: str) -> None:
    built = build_model(model, granularity=granularity, num_classes=1000, seed=0, dtype=torch.float32)
    assert read_table(TABLES / shipped_name(model, granularity, 1000)) == describe(built)


def test_every_shipped_table_is_there() -> None:
    assert {p.name for p in TABLES.glob("*.csv")} == {shipped_name(m, g, 1000) for m, g in shipped()}


CUSTOM = """
from torch import nn
calls = []
def build(num_classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.ReLU(), nn.Linear(width, num_classes))
def in_place():
    return nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))
def no_sequential():
    return nn.Linear(2, 2)
def raises():
    raise RuntimeError("my own fault")
"""


def test_a_users_own_model_is_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_described.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Model(name="custom", target="mine_described.build", options=(("width", 6),))
    for _ in range(2):
        table = layer_table(model, granularity="block", num_classes=3, cache_dir=tmp_path)
        assert [layer.parameters for layer in table] == [0, 78, 0, 21]
    files = list((tmp_path / "tables").glob("*.csv"))
    assert len(files) == 1
    (tmp_path / "mine_described.py").write_text(CUSTOM.replace("width=4", "width=5"))
    layer_table(model, granularity="block", num_classes=3, cache_dir=tmp_path)
    assert len(list((tmp_path / "tables").glob("*.csv"))) == 2, "a changed source is described again"


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("in_place", "works in place"),
        ("no_sequential", "not a non-empty nn.Sequential"),
        ("raises", "my own fault"),
        ("gone", "cannot be imported"),
    ],
)
def test_a_users_own_model_that_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, part: str
) -> None:
    (tmp_path / "mine_wrong.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Model(name="custom", target=f"mine_wrong.{function}")
    with pytest.raises(UserError) as caught:
        layer_table(model, granularity="block", num_classes=3, cache_dir=tmp_path)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_option_that_the_users_function_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_options.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = Model(name="custom", target="mine_options.build", options=(("depth", 6),))
    with pytest.raises(UserError, match=r"model\.depth=6"):
        build_model(model, granularity="block", num_classes=3, seed=0, dtype=torch.float32)


def test_the_tables_are_read_without_torch() -> None:
    code = (
        "import sys, pathlib, models, models.table as t; from bench.factors import Model\n"
        "m = Model(name='r', target='models.resnet.resnet18')\n"
        "assert len(t.layer_table(m, granularity='block', num_classes=1000, cache_dir=pathlib.Path('/x'))) == 15\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
