"""Promise: compiling changes nothing but the time, and where it can't be done a line says why."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.codegen.triton import TritonOverrides
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from tests.helpers.refusals import named
from tests.helpers.steps import assert_same_bits
from tests.helpers.toys import SMALL, TokenTask, build_alone, make_recipe, rows_to, run_steps
from tests.helpers.world import Ranks
from trainer.config.model import CompileConfig
from trainer.distributed.parallel import World
from trainer.models import compiling, inductor
from trainer.models.compiling import CACHE_VARIABLE, missing_for_compiling, prepare_cache, torch_mode
from trainer.train.components.run import build
from trainer.train.components.task import make_task
from trainer.train.evaluate import evaluate_run
from trainer.train.loop import train
from trainer.train.reduction import FixedGradients, TreeSum
from trainer.train.step import train_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MISSING = missing_for_compiling(CPU)
needs_a_compiler = pytest.mark.skipif(MISSING is not None, reason=f"torch.compile: {MISSING}")

# The whole of torch's compiler but for the C++, which costs seconds for each graph; and all of it. Called:
# what would be compiled stays as it is: all but torch's part.
COMPILER, INDUCTOR, CALLED, TRACED = "aot_eager_decomp_partition", "inductor", "called", "eager"
BACKENDS = [COMPILER, pytest.param(INDUCTOR, marks=[pytest.mark.slow, needs_a_compiler])]
SIZES = {"global_batch_size": 8, "micro_batch_size": 4}


def compile_by(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    if backend == INDUCTOR:
        return
    compile_ = torch.compile

    def compile_so(function: Any, dynamic: bool, **_: Any) -> Any:
        return function if backend == CALLED else compile_(function, backend=backend, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_so)
    monkeypatch.setattr("trainer.train.components.model.missing_for_compiling", lambda _: None)
    if backend == CALLED:
        monkeypatch.setattr(compiling, "set_up_torch", lambda: None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("scope", "last"), [("model", "weighted"), ("blocks", "cross")])
def test_a_compiled_model_learns_the_same_and_never_compiles_again(
    scope: str, last: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an epoch's ragged end, too: 20 samples in batches of 8."""
    compile_by(monkeypatch, backend)
    losses: list[list[float]] = []
    for mode in ("none", "default"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        recipe = make_recipe(
            epochs=2,
            compile={"mode": mode, "scope": scope},
            data={**SIZES, "last_batch": last},
            optim={"lr": 0.01},
        )
        run = build_alone(recipe, TokenTask(20, ragged=True, dtype=torch.float32, blocks=2))
        batches, series, made = run.loader(run.share.batches()), list[float](), list[int]()
        for step in range(run.plan.steps):
            train_step(run, batches, step)
            series.append(float(run.state.loss))
            made.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        losses.append(series)
        assert {*made} == {made[0]} and bool(made[0]) == (mode != "none")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def with_everything(
    world: World, scope: str, mode: str, backend: str
) -> tuple[list[float], dict[str, Any], list[str]]:
    """On one of the ranks. Without dropout: compiled code draws other numbers than eager code."""
    torch.compiler.reset()
    recipe = make_recipe(
        **SMALL
        | {"memory": {"checkpointing": "blocks", "every": 2}, "compile": {"mode": mode, "scope": scope}}
        | {"model": {"width": 4, "blocks": [1, 1]}, "max_steps": 3}
    )
    with pytest.MonkeyPatch.context() as patch:
        compile_by(patch, backend)
        run = build(recipe, make_task(recipe), world, workers=0)
        losses = run_steps(run)
        figures, _ = evaluate_run(run)
    return losses, figures, list(run.notes)


@pytest.mark.parametrize(
    "backend",
    [
        CALLED,
        # torch 2.5 refuses some graphs within DDP.
        pytest.param(TRACED, marks=[pytest.mark.compat, pytest.mark.slow]),
        *(pytest.param(name, marks=pytest.mark.slow) for name in (COMPILER, INDUCTOR)),
    ],
)
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_compiling_goes_with_ddp_checkpointing_and_batchnorm(ranks: Ranks, scope: str, backend: str) -> None:
    if (backend, scope) == (TRACED, "model") and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10):
        # That backend is for debugging: with it newer checkpoints find BatchNorm's count changed in place.
        pytest.skip("torch's eager backend doesn't go with checkpointed BatchNorm here")
    eager = ranks.run(2, with_everything, scope, "none", backend)
    compiled = ranks.run(2, with_everything, scope, "default", backend)
    rounding = 0 if backend == CALLED else 1e-3
    assert any("DDP" in note for note in compiled[0][2]) != compiling.SPLITS_ALL_GRAPHS
    for (losses, figures, _), (compiled_losses, compiled_figures, notes) in zip(eager, compiled, strict=True):
        assert compiled_losses == pytest.approx(losses, rel=rounding)
        assert compiled_figures["loss"] == pytest.approx(figures["loss"], rel=rounding)
        assert any(note.startswith(f"compiling the {scope}") for note in notes)


def one_rank_cannot(world: World) -> list[str]:
    recipe = make_recipe(compile={"mode": "default"}, data=SIZES)
    with pytest.MonkeyPatch.context() as patch:
        missing = "no compiler was found (g++); install g++" if world.rank else None
        patch.setattr("trainer.train.components.model.missing_for_compiling", lambda _: missing)
        return list(build(recipe, TokenTask(16), world, 0).notes)


def test_if_one_rank_cannot_compile_none_does(ranks: Ranks) -> None:
    first, second = ranks.run(2, one_rank_cannot)
    assert "rank 1: no compiler was found" in first[0] and "no compiler was found" in second[0]


def test_the_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert prepare_cache() == (None, None)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "own"))
    assert prepare_cache() == (tmp_path / "own", None)
    assert os.environ[CACHE_VARIABLE] == str(tmp_path / "own")
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    folder, problem = prepare_cache()
    assert folder is None and named(str(problem), "TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.parametrize(("mode", "warm_up"), [("default", 1), ("reduce-overhead", 3)])
def test_steps_that_compile_are_not_timed(mode: Any, warm_up: int) -> None:
    config = CompileConfig(mode=mode)
    assert config.warm_up == warm_up
    run = build_alone(make_recipe(epochs=2, data=SIZES), TokenTask(40))
    object.__setattr__(run, "recipe", run.recipe.model_copy(update={"compile": config}))
    train(run, out := rows_to(run))
    assert out.logger.logged.samples == (run.plan.steps - warm_up) * 8


@pytest.mark.parametrize("reduction", ["all_reduce", "tree"])
def test_gradients_stay_in_place_for_cuda_graphs(reduction: str) -> None:
    """A replayed graph writes its gradients to the same memory: they are added to, never taken over."""
    recipe = make_recipe(
        epochs=2,
        data=SIZES,
        optim={"lr": 0.01, "max_grad_norm": 1.0},
        parallel={"threads": 1, "reduction": reduction},
    )
    weights = []
    for graphs_used in (False, True):
        run = build_alone(recipe, TokenTask(40))
        if graphs_used:
            object.__setattr__(run, "gradients", FixedGradients(run.state.model))
            if isinstance(run.reduction, TreeSum):
                run.reduction._gradients = run.gradients
        parameters = run.gradients.parameters
        addresses = {p.grad.data_ptr() for p in parameters if p.grad is not None}
        assert len(addresses) == (len(parameters) if graphs_used else 0)
        run_steps(run)
        assert {p.grad.data_ptr() for p in parameters if p.grad is not None} == addresses
        weights.append([p.detach().clone() for p in parameters])
    assert_same_bits(*weights)


def test_a_failure_of_the_compiler_is_known_as_one() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.compile(torch.sin, backend=lambda *_: 1 / 0)(torch.ones(1))
    assert [compiling.failed_to_compile(one) for one in (raised.value, RuntimeError())] == [True, False]


@pytest.mark.compat  # the newest torch has both
def test_what_generates_wrong_code_for_gpus_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonOverrides, "_can_use_4x_random", staticmethod(lambda: True), raising=False)
    compiling.set_up_torch()
    assert not TritonOverrides._can_use_4x_random()  # type: ignore[attr-defined]
    assert TritonOverrides.rand("seed", "x") == "tl.rand(seed, (x).to(tl.uint32))"
    assert not getattr(config.triton, "mix_order_reduction", False)


@pytest.mark.compat
def test_caches_have_a_key_for_each_precision_and_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {inductor.cache_key()}
    for kind in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", kind):
            keys.add(inductor.cache_key())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({*keys, inductor.cache_key()}) == 4


@pytest.mark.slow
@needs_a_compiler
def test_code_of_another_precision_is_not_taken_from_a_cache() -> None:
    compiling.set_up_torch()
    for kind in (torch.bfloat16, torch.float16):
        torch._dynamo.reset()
        with torch.autocast("cpu", kind):
            assert torch.compile(torch.mm)(torch.ones(7, 7), torch.ones(7, 7)).dtype == kind


def queued(w: torch.Tensor, x: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    """Compares with keys of earlier steps, and then replaces some, as MoCo does."""
    keys, whole = queue.clone(), torch.empty_like(queue).copy_(queue)
    made = x @ w
    queue[: len(x)] = made.detach()
    return (made @ keys.T).exp().sum(1) + (made @ whole.T).sum(1)


def test_a_copy_of_what_changes_later_stays() -> None:
    from torch._inductor.fx_passes import post_grad

    compiling.set_up_torch()
    graph = make_fx(queued, tracing_mode="fake")(torch.ones(6, 4), torch.ones(2, 6), torch.ones(8, 4)).graph
    copies = [node.name for node in graph.nodes if "clone" in node.name]
    assert copies
    post_grad.remove_noop_ops(graph)
    assert [node.name for node in graph.nodes if "clone" in node.name] == copies


def faded(w: torch.Tensor, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Weighs by counts, some by an index and some in a view, and then counts on."""
    y = (x @ w).tanh() * torch.exp(-count[x.argmax(1)] / 9) * (count[: w.shape[1], 0] * 2)
    count.index_add_(0, x.argmax(1), y.detach())
    return y.sum(1)


def spread(w: torch.Tensor, x: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
    """Reads what is scattered beside what is read by an index."""
    y, i, j = (x @ w).tanh() * 1, x.argmax(1) % 4, x.argmin(1) % 4 + torch.tensor([0, 1, 2, 3, 4])
    sums = torch.scatter_add(queue, 0, j[:4, None].expand(4, 4), queue[:4].index_select(0, i[:4]))
    return (y + queue[:4, 0][i][:, None].expand(5, 4)) * torch.sigmoid(sums[:5])


@pytest.mark.compat
def test_what_is_made_of_what_changes_later_is_saved() -> None:
    def functional(w: torch.Tensor, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        y = (x @ w).tanh() * (count.t() * 2)
        count.copy_(count + 1)
        return y

    compiling.set_up_torch()
    marks: Any = config.joint_custom_post_pass
    marks(graph := make_fx(functional)(torch.ones(6, 4), torch.ones(2, 6), torch.ones(4, 1)).graph)
    saved = [n.name for n in graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_SAVE]
    assert saved == ["mul", "add"]


@pytest.mark.compat
def test_what_is_read_elsewhere_is_changed_in_a_kernel_of_its_own() -> None:
    aten, copy = torch.ops.aten, torch.ops.aten.copy_.default

    def changes(count: torch.Tensor, codes: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        made, read = codes.exp(), codes.cumsum(0)
        for one in (codes, made, read, read[1:]):
            aten.index_put(one, (i,), i)
        count.copy_(count.mul(0.9).add(1))
        codes.copy_(codes.flip(0))
        return read

    graph = make_fx(changes, tracing_mode="fake")(torch.ones(4), torch.ones(4), torch.arange(2)).graph
    put = [node for node in graph.nodes if node.target is aten.index_put.default]
    assert [inductor.is_read_just_here(node) for node in put] == [False, True, False, False]
    inductor.copy_apart(graph)
    kept = [node.target for node in graph.nodes if node.name.startswith("copy")]
    assert kept == [copy, torch.ops.trainer.copy_into.default]


@pytest.mark.compat
def test_a_float64_buffer_without_dimensions_changes() -> None:
    compiling.set_up_torch()
    largest = torch.zeros((), dtype=torch.float64)
    torch.compile(lambda x, most: most.add_(x.amax()) is x, backend="aot_eager")(torch.ones(2), largest)
    assert largest == 1


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize(("changing", "rows"), [(queued, (6, 6, 8)), (faded, (6, 6, 8)), (spread, (4, 5, 9))])
def test_what_changes_later_gives_what_eager_code_gives(changing: Any, rows: tuple[int, ...]) -> None:
    compiling.set_up_torch()
    found = []
    for call in (changing, torch.compile(changing)):
        torch.manual_seed(0)
        w, x, queue = (
            torch.randn(*size, dtype=torch.float64) for size in zip(rows, (4, rows[0], 4), strict=True)
        )
        made = call(w.requires_grad_(), x, queue)
        (gradient,) = torch.autograd.grad(made.square().sum(), w)
        found.append((made, gradient, queue))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-8)


def test_cuda_graphs_are_of_the_whole_model() -> None:
    with pytest.raises(ValueError, match=r"use compile\.scope=model"):
        CompileConfig(mode="reduce-overhead", scope="blocks")
    whole, blocks = (CompileConfig(mode="max-autotune", scope=scope) for scope in ("model", "blocks"))
    assert torch_mode(whole, CUDA) == "max-autotune"
    assert torch_mode(whole, CPU) == torch_mode(blocks, CUDA) == "max-autotune-no-cudagraphs"
    assert (blocks.cuda_graphs, blocks.warm_up) == (False, 1)
    assert torch_mode(CompileConfig(mode="reduce-overhead"), CPU) == "default"


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_dropout_is_recomputed_alike(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by(monkeypatch, backend)

    def losses(memory: dict[str, Any]) -> list[float]:
        torch._dynamo.reset()
        recipe = make_recipe(
            data={"global_batch_size": 8, "micro_batch_size": 8},
            epochs=4,
            optim={"lr": 0.05},
            compile={"mode": "default", "scope": "blocks"},
            memory=memory,
        )
        run = build_alone(recipe, TokenTask(16, dtype=torch.float32, blocks=2, dropout=0.5))
        return [*run_steps(run, 8), *(float(p.detach().sum()) for p in run.gradients.parameters)]

    assert losses({"checkpointing": "blocks"}) == pytest.approx(losses({}), rel=1e-5)
