"""Bad calls of everything public: a call that works, and for each argument values that must not.

A row is the name of a call in `CALLS`, the argument that is wrong, and its value. `World` has one
small model and the results of one run each, which the calls use.
"""

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import torchfmri
from torchfmri import reference, routing, statistics
from torchfmri.integrations.writers import TensorBoardWriter, WandbWriter

NAN = math.nan


class Words(nn.Module):
    """A language model of a few units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 4)
        self.mlp = nn.Linear(4, 4)
        self.head = nn.Linear(4, 300)

    def forward(self, ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return self.head(torch.tanh(self.mlp(self.embed(ids))))


class Tokenizer:
    """A token for each byte."""

    chat_template = None
    pad_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


class Logger:
    """As a SummaryWriter or a run."""

    def add_scalar(self, *_: Any) -> None: ...

    def log(self, *_: Any) -> None: ...


class World:
    """What the calls use; everything is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = Words()
        self.tokenizer = Tokenizer()
        self.ids = torch.arange(6).view(2, 3)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), 0.1)

    @cached_property
    def inspector(self) -> torchfmri.Inspector:
        inspector = torchfmri.Inspector(self.model)
        inspector.watch("*", what=["activations", "gradients"])
        inspector.run_inspection(self.ids, loss="sum")
        return inspector

    @cached_property
    def inspection(self) -> torchfmri.Inspection:
        return self.inspector.inspection

    @cached_property
    def scan(self) -> torchfmri.Scan:
        return torchfmri.scan(self.model, None, [1, 2, 3], 2)

    @cached_property
    def tiny(self) -> dict[str, Any]:
        model, tokenizer = torchfmri.load_model("tiny")
        return {"model": model, "tokenizer": tokenizer, "prompt": "hi"}

    @cached_property
    def labelled(self) -> torchfmri.Scan:
        """Two sequences of different conditions."""
        scanner = torchfmri.Scanner(self.model, None)
        prompts, names = [[1, 2, 3], [4, 5, 6]], ["first", "second"]
        return scanner.scan(prompts, 2, names=names, conditions=["x", "y"])

    @cached_property
    def monitor(self) -> torchfmri.Monitor:
        monitor = torchfmri.Monitor(self.model, self.optimizer)
        with monitor.step() as step:
            loss = self.model(self.ids).mean()
            loss.backward()
            step.loss(loss)
        self.model.zero_grad()
        return monitor

    @cached_property
    def tokens(self) -> torchfmri.TokenGradients:
        with torchfmri.token_gradients(self.model) as tokens:
            torch.autograd.grad(self.model(self.ids).mean(), list(self.model.parameters()))
        return tokens

    @cached_property
    def losses(self) -> torchfmri.TokenLossGradients:
        with torchfmri.token_gradients(self.model, "mlp", per="token_loss") as tokens:
            tokens.backward(self.token_losses(self.model), project=4, keep="factors")
        return tokens

    def token_losses(self, model: nn.Module) -> torch.Tensor:
        return torchfmri.token_losses(model(self.ids), self.ids)

    @cached_property
    def cost(self) -> torchfmri.Cost:
        return torchfmri.cost(
            self.model, self.ids, lambda out: out.sum(), sizes={"batch": [1, 2, 3]}, rounds=1
        )

    @cached_property
    def verification(self) -> torchfmri.Verification:
        return torchfmri.verify_gradients(self.model, self.ids, lambda out: out.sum())

    @cached_property
    def numbers(self) -> statistics.Statistics:
        return torchfmri.calculate_statistics(torch.randn(5, 4))

    @cached_property
    def router(self) -> routing.RoutingLanguageModel:
        return routing.RoutingLanguageModel(routing.RoutingConfig(20, 8, 1, 2))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (
            routing.computation_parameters(self.router),
            routing.routing_parameters(self.router),
        )
        return [torch.optim.SGD(part, 0.1) for part in parts]

    def dynamics(self, **options: Any) -> routing.LearningDynamics:
        first, second = self.optimizers()
        given = {"model": self.router, "optimizer": first, "meta_optimizer": second} | options
        return routing.LearningDynamics(**given)


def _scan(world: World, **options: Any) -> Any:
    given = {
        "model": world.model,
        "tokenizer": world.tokenizer,
        "prompt": "hi",
        "max_new_tokens": 1,
    }
    return torchfmri.scan(**(given | options))


def _contrast(world: Any, **options: Any) -> Any:
    first, second = (
        torchfmri.Scan(world.scan.anatomy, [sequence], world.scan.meta)
        for sequence in world.labelled
    )
    return torchfmri.contrast(**({"a": first, "b": second} | options))


def _dataset(world: World, **options: Any) -> Any:
    given = {"model": world.model, "tokenizer": world.tokenizer, "dataset": ["hi"]}
    given |= {"out": world.folder / "x.fmri", "max_new_tokens": 1}
    return torchfmri.scan_dataset(**(given | options))


def _verify(world: World, **options: Any) -> Any:
    given = {"model": world.model, "data": world.ids, "loss": lambda out: out.sum()}
    return torchfmri.verify_gradients(**(given | options))


def _cost(world: World, **options: Any) -> Any:
    given = {"model": world.model, "data": world.ids, "loss": lambda out: out.sum(), "rounds": 1}
    return torchfmri.cost(**(given | options))


def _advise(world: World, **options: Any) -> Any:
    given = {"model": world.model, "data": world.ids, "loss": lambda out: out.sum(), "rounds": 1}
    return torchfmri.advise(**(given | options))


def _diagnose(world: World, **options: Any) -> Any:
    batches = [(world.ids, world.ids)] * 2
    given = {"model": world.model, "batches": batches, "steps": 2, "show": False}
    given |= {"loss": lambda out, y: out.mean(), "optimizer": world.optimizer}
    return torchfmri.diagnose(**(given | options))


def _recording(world: World, **options: Any) -> None:
    with torchfmri.Inspector(world.model).recording(**options):
        world.model(world.ids)


def _anatomy(_: World, **options: Any) -> Any:
    given = {"layers": ("a", "b"), "types": ("Linear", "Linear")}
    given |= {"layer": np.array([0, 1], np.int32), "start": np.zeros(2, np.int32)}
    given |= {"count": np.ones(2, np.int32), "kind": np.zeros(2, np.uint8)}
    return torchfmri.Anatomy(**(given | options))


def _widths(_: World, **options: Any) -> Any:
    given: dict[str, Any] = {"layers": ["a", "b"], "types": ["Linear"] * 2, "widths": [4, 4]}
    return torchfmri.Anatomy.of_widths(**(given | {"sizes": [2, 2]} | options))


def _dots(world: World, **options: Any) -> Any:
    given = {"model": world.model, "losses_of": world.token_losses}
    given |= {"direction": {"mlp.weight": torch.ones(4, 4)}}
    return torchfmri.token_loss_dots(**(given | options))


def _losses(_: World, **options: Any) -> Any:
    given = {"logits": torch.zeros(2, 3, 5), "labels": torch.zeros(2, 3, dtype=torch.long)}
    return torchfmri.token_losses(**(given | options))


def _linear(_: World, **options: Any) -> Any:
    return reference.linear(**({"x": torch.ones(2, 3), "weight": torch.ones(4, 3)} | options))


def _attention(function: Callable[..., Any]) -> Callable[..., Any]:
    def act(_: World, **options: Any) -> Any:
        parts = dict.fromkeys(("query", "key", "value"), torch.ones(1, 2, 3, 4))
        return function(**(parts | options))

    return act


def _generate(world: World, **options: Any) -> Any:
    given = {"input_ids": world.ids, "max_new_tokens": 1, "do_sample": True}
    return world.router.generate(**(given | options))


def _map(world: World, **options: Any) -> Any:
    return routing.map_prototypes(
        **({"model": world.router, "ids": world.ids, "labels": world.ids} | options)
    )


def _of(make: Callable[[World], Callable[..., Any]], **given: Any) -> Callable[..., Any]:
    """A call of what `make` finds in a world, with these arguments unless others are given."""
    return lambda world, **options: make(world)(**(given | options))


CALLS: dict[str, Callable[..., Any]] = {
    "Inspector": lambda world, **o: torchfmri.Inspector(**({"model": world.model} | o)),
    "Inspector.layers": _of(lambda world: world.inspector.layers),
    "Inspector.watch": _of(lambda world: torchfmri.Inspector(world.model).watch),
    "Inspector.unwatch": _of(lambda world: world.inspector.unwatch),
    "Inspector.run_inspection": lambda world, **o: torchfmri.Inspector(world.model).run_inspection(
        **({"data": world.ids} | o)
    ),
    "Inspector.recording": _recording,
    "Inspector.get_statistics": _of(lambda world: world.inspector.get_statistics, layer="mlp"),
    "Inspector.plot_histogram": _of(lambda world: world.inspector.plot_histogram, layer="mlp"),
    "Inspector.plot_statistics": _of(lambda world: world.inspector.plot_statistics),
    "Inspector.plot_feature_maps": _of(
        lambda world: world.inspector.plot_feature_maps, layer="mlp"
    ),
    "Inspector.plot_compare": lambda world, **o: world.inspector.plot_compare(
        **({"a": world.inspection, "b": world.inspection} | o)
    ),
    "Inspection[]": lambda world, layer: world.inspection[layer],
    "Inspection.statistics": _of(lambda world: world.inspection.statistics, layer="mlp"),
    "Inspection.table": _of(lambda world: world.inspection.table),
    "Inspection.rows": _of(lambda world: world.inspection.rows),
    "Record.statistics": _of(lambda world: world.inspection["mlp"].statistics),
    "Record.tensors": _of(lambda world: world.inspection["mlp"].tensors),
    "Call.statistics": _of(lambda world: world.inspection["mlp"].calls[0].statistics),
    "Call.tensors": _of(lambda world: world.inspection["mlp"].calls[0].tensors),
    "compare": lambda world, **o: torchfmri.compare(
        **({"a": world.inspection, "b": world.inspection} | o)
    ),
    "edited": lambda world, **o: torchfmri.edited(
        **({"model": world.model, "edits": {"mlp": "zero"}} | o)
    ).__enter__(),
    "lesion": lambda world, **o: torchfmri.lesion(
        world.tiny["model"],
        world.tiny["tokenizer"],
        **({"prompts": "The cat", "answers": " sat", "of": "mlps"} | o),
    ),
    "patch": lambda world, **o: torchfmri.patch(
        world.tiny["model"],
        world.tiny["tokenizer"],
        **({"clean": "The cat", "corrupted": "The dog", "answer": " sat"} | o),
    ),
    "steer": lambda world, **o: torchfmri.steer(
        world.tiny["model"],
        world.tiny["tokenizer"],
        **({"prompt": "The cat", "direction": torch.ones(144), "place": "L2"} | o),
    ),
    "Run": lambda world, **o: torchfmri.Run(**({"model": world.model, "data": world.ids} | o)),
    "import_hidden_states": lambda _, **o: torchfmri.import_hidden_states(**o),
    "Inspection.save": _of(lambda world: world.inspection.save),
    "Inspection.load": lambda _, **o: torchfmri.Inspection.load(**o),
    "History.save": _of(lambda world: world.monitor.history.save),
    "History.load": lambda _, **o: torchfmri.History.load(**o),
    "load_model": lambda _, **o: torchfmri.load_model(**({"name": "tiny"} | o)),
    "Monitor": lambda world, **o: torchfmri.Monitor(**({"model": world.model} | o)),
    "Monitor.loss": _of(lambda world: world.monitor.loss),
    "Monitor.add_writer": _of(lambda world: world.monitor.add_writer),
    "Monitor.plot": _of(lambda world: world.monitor.plot),
    "Monitor.table": _of(lambda world: world.monitor.table),
    "Monitor.export": _of(lambda world: world.monitor.export),
    "History": lambda _, **o: torchfmri.History(**o),
    "History[]": lambda world, position: world.monitor.history[position],
    "History.scalar": _of(lambda world: world.monitor.history.scalar),
    "History.values": _of(lambda world: world.monitor.history.values, layer="mlp"),
    "History.matrix": _of(lambda world: world.monitor.history.matrix),
    "History.statistics": _of(lambda world: world.monitor.history.statistics, layer="mlp"),
    "History.update_ratio": _of(lambda world: world.monitor.history.update_ratio),
    "History.export": _of(lambda world: world.monitor.history.export),
    "Incidents": lambda _, **o: torchfmri.Incidents(**o),
    "diagnose": _diagnose,
    "calculate_statistics": lambda _, **o: torchfmri.calculate_statistics(
        **({"tensor": torch.ones(3)} | o)
    ),
    "calculate_channel_statistics": lambda _, **o: statistics.calculate_channel_statistics(
        **({"tensor": torch.ones(3, 2), "axis": 1} | o)
    ),
    "merge_statistics": lambda _, **o: statistics.merge_statistics(**o),
    "Statistics[]": lambda world, key: world.numbers[key],
    "Statistics.quantile": _of(lambda world: world.numbers.quantile),
    "Statistics.linear_histogram": _of(lambda world: world.numbers.linear_histogram),
    "Statistics.merge": _of(lambda world: world.numbers.merge),
    "Statistics.from_dict": lambda _, **o: statistics.Statistics.from_dict(**o),
    "explain": lambda _, **o: torchfmri.explain(**({"exception": ValueError("x")} | o)),
    "explained": lambda _, **o: torchfmri.explained(**o).__enter__(),
    "scan": _scan,
    "stream": lambda world, **o: list(
        torchfmri.stream(
            **({"model": world.model, "tokenizer": None, "prompt": [1], "max_new_tokens": 1} | o)
        )
    ),
    "scan_dataset": _dataset,
    "ScanOptions": lambda _, **o: torchfmri.ScanOptions(**o),
    "Scanner": lambda world, **o: torchfmri.Scanner(**({"model": world.model} | o)),
    "Scanner.scan": lambda world, **o: torchfmri.Scanner(world.model).scan(
        **({"prompt": [1, 2], "max_new_tokens": 1} | o)
    ),
    "lens": lambda world, **o: torchfmri.lens(**(world.tiny | o)),
    "attribute_logit": lambda world, **o: torchfmri.attribute_logit(**(world.tiny | o)),
    "attribute_inputs": lambda world, **o: torchfmri.attribute_inputs(
        **(world.tiny | {"steps": 1} | o)
    ),
    "Scan.attention": _of(lambda world: world.scan.attention),
    "Scan.plot_attention": _of(lambda world: world.scan.plot_attention, layer="mlp"),
    "Scan[]": lambda world, index: world.scan[index],
    "contrast": _contrast,
    "Scan.contrast": _of(lambda world: world.labelled.contrast, a="x - y"),
    "Scan.to_dataframe": _of(lambda world: world.scan.to_dataframe),
    "Scan.values": _of(lambda world: world.scan.values),
    "Scan.delta_sc": _of(lambda world: world.scan.delta_sc),
    "Scan.statistics": _of(lambda world: world.scan.statistics, layer="mlp"),
    "Scan.plot_brain": _of(lambda world: world.scan.plot_brain),
    "Scan.plot_layers": _of(lambda world: world.scan.plot_layers),
    "Scan.plot_token": _of(lambda world: world.scan.plot_token, index=1),
    "Scan.plot_voxels": _of(lambda world: world.scan.plot_voxels, layer="mlp"),
    "Scan.draw": _of(lambda world: world.scan.draw),
    "Scan.save_html": lambda world, **o: world.scan.save_html(
        **({"path": world.folder / "x.html"} | o)
    ),
    "Scan.widget": _of(lambda world: world.scan.widget),
    "view": lambda world, **o: torchfmri.view(**({"what": world.scan, "browser": False} | o)),
    "Scan.save": lambda world, **o: world.scan.save(**({"path": world.folder / "s.fmri"} | o)),
    "Scan.export": lambda world, **o: world.scan.export(**o),
    "load": lambda _, **o: torchfmri.load(**o),
    "generate": lambda _, **o: torchfmri.scan(
        *torchfmri.load_model("tiny"),
        "A",
        1,
        per=None,
        layers="*.0.mlp",
        do_sample=True,
        seed=1,
        **o,
    ),
    "Anatomy": _anatomy,
    "Anatomy.of_widths": _widths,
    "Anatomy.column": _of(lambda world: world.scan.anatomy.column),
    "token_gradients": lambda world, **o: torchfmri.token_gradients(**({"model": world.model} | o)),
    "TokenGradients[]": lambda world, name: world.tokens[name],
    "TokenGradients.norm": _of(lambda world: world.tokens.norm),
    "TokenGradients.on": _of(lambda world: world.tokens.on),
    "TokenGradients.select": _of(lambda world: world.tokens.select),
    "TokenGradients.project": _of(lambda world: world.tokens.project, k=4),
    "TokenGradients.dot": _of(lambda world: world.tokens.dot),
    "TokenGradient.norm": _of(lambda world: world.tokens["mlp.weight"].norm),
    "TokenGradient.dot": _of(lambda world: world.tokens["mlp.weight"].dot),
    "TokenGradient.sum": _of(lambda world: world.tokens["mlp.weight"].sum),
    "TokenGradient.topk": _of(lambda world: world.tokens["mlp.weight"].topk),
    "TokenGradient.project": _of(lambda world: world.tokens["mlp.weight"].project, k=4),
    "TokenGradient[]": lambda world, where: world.tokens["mlp.weight"][where],
    "TokenGradient.materialise": _of(lambda world: world.tokens["mlp.weight"].materialise),
    "TokenLossGradients[]": lambda world, name: world.losses[name],
    "TokenLossGradients.project": _of(lambda world: world.losses.project, k=4),
    "TokenLossGradient.dot": _of(lambda world: world.losses["mlp.weight"].dot),
    "token_loss_dots": _dots,
    "token_losses": _losses,
    "verify_gradients": _verify,
    "Verification.layers": lambda world, name: world.verification.layers[name],
    "cost": _cost,
    "Cost[]": lambda world, layer: world.cost[layer],
    "Growth.predict": _of(lambda world: world.cost.growth.predict),
    "advise": _advise,
    "reference.linear": _linear,
    "reference.attention": _attention(reference.attention),
    "reference.light_attention": _attention(reference.light_attention),
    "SparseProtoLinear": lambda _, **o: routing.SparseProtoLinear(
        **({"in_features": 2, "out_features": 3} | o)
    ),
    "MoIETransformerBlock": lambda _, **o: routing.MoIETransformerBlock(
        **({"hidden_size": 8, "heads": 2} | o)
    ),
    "RoutingConfig": lambda _, **o: routing.RoutingLanguageModel(
        routing.RoutingConfig(**({"vocab_size": 20, "hidden_size": 8, "blocks": 1, "heads": 2} | o))
    ),
    "RoutingLanguageModel": lambda _, **o: routing.RoutingLanguageModel(**o),
    "RoutingLanguageModel.generate": _generate,
    "LearningDynamics": lambda world, **o: world.dynamics(**o),
    "Divergence": lambda _, **o: routing.Divergence(**o),
    "Price": lambda _, **o: routing.Price(**o),
    "UnitRates": lambda world, **o: routing.UnitRates(**({"model": world.router, "tasks": 2} | o)),
    "map_prototypes": _map,
    "computation_parameters": lambda _, **o: routing.computation_parameters(**o),
    "routing_parameters": lambda _, **o: routing.routing_parameters(**o),
    "routing.plot_activation": lambda _, **o: routing.plot_activation(**({"histories": {}} | o)),
    "routing.plot_tradeoff": lambda _, **o: routing.plot_tradeoff(**({"points": {}} | o)),
    "TensorBoardWriter": lambda _, **o: TensorBoardWriter(**({"writer": Logger()} | o)),
    "WandbWriter": lambda _, **o: WandbWriter(**({"run": Logger()} | o)),
}

NO_MODEL = ("tiny", 7, {}, nn.Linear, [nn.Linear(1, 1)])
NO_PATTERN = (7, [], [7], nn, ("mlp", None))
NO_LAYER = ("mpl", 7, None)
NO_COUNT = (0, -1, 1.5, "3", None, True, NAN)
NO_SEQUENCE = (3, -7, "x", 1.5)
NO_PATH = ("a\0b", "\ud800", "x" * 300, b"x", "")
WITHOUT_VALUES = nn.Linear(4, 4, device="meta")

COMPARED: dict[str, tuple[Any, ...]] = {
    "metric": ("x", 7),
    "level": ("x", 7, "unit"),
    "layers": (7, "mpl"),
    "tokens": ("x", 1.5, None, (1,), {"match": "("}),
    "alpha": (0, 1, "x", NAN),
    "height_control": ("x", 7),
    "two_sided": (1, "x"),
    "test": ("x", 7),
    "permutations": (-1, 1.5),
    "seed": (-1, 1.5),
}
"""What contrasts have in common."""

BAD: dict[str, dict[str, tuple[Any, ...]]] = {
    "Inspector": {
        "model": (*NO_MODEL, None), "keep": ("everything", 3, None), "max_bytes": (-1, "many", 1.5),
        "device": ("gpu", 3.5, "cuda:x"), "dtype": ("floaty", 3, torch.ones(1)),
    },
    "Inspector.layers": {"pattern": (*NO_PATTERN, None, "mpl"), "exclude": (7, [7], "*")},
    "Inspector.watch": {
        "pattern": (*NO_PATTERN, None, "mpl"), "what": ("activation", 7, [], ["x"], None),
        "per": ("unit", 7), "exclude": (7, "*"),
    },
    "Inspector.unwatch": {"pattern": (7, None), "what": ("activation", 7)},
    "Inspector.run_inspection": {
        "data": ([1, 2], (1, 2, 3, 4), None, "x", torch.ones(2, device="meta")), "target": (1,),
        "loss": ("mean", 3, True),
        "keep": ("all", 3), "max_bytes": (-1, "x"), "dtype": ("x",), "keeep": (1,),
    },
    "Inspector.recording": {"keep": ("all", 3), "max_bytes": (-1, "x"), "other": (1,)},
    "Inspector.get_statistics": {"layer": NO_LAYER, "what": ("inputs", "x", 7), "call": (9, "x")},
    "Inspector.plot_histogram": {"layer": NO_LAYER, "what": ("inputs", "x", 7)},
    "Inspector.plot_statistics": {"what": ("inputs", "x", 7)},
    "Inspector.plot_feature_maps": {"layer": ("mpl",)},
    "Inspector.plot_compare": {"a": (None, "x", 7), "b": (None, {}), "what": ("x",)},
    "Inspection[]": {"layer": NO_LAYER},
    "Inspection.statistics": {"layer": NO_LAYER, "what": ("inputs", "x", 7)},
    "Inspection.table": {"what": ("x", 7)},
    "Inspection.rows": {"what": ("x", 7)},
    "Record.statistics": {
        "what": ("x", "inputs", 7), "element": (5, "x"), "call": (9, "x"), "per": ("unit", 7),
    },
    "Record.tensors": {"what": ("x", 7, None)},
    "Call.statistics": {"what": ("x", 7), "element": (5, "x", None)},
    "Call.tensors": {"what": ("x", 7, None)},
    "compare": {
        "a": (None, "x", {}, 7), "b": (None, "x", []),
        "tolerance": (-1, "x", NAN, True), "names": ("x", [1], {"x": "y"}, 7),
    },
    "edited": {"model": (*NO_MODEL, None), "edits": (7, [], {}, {"mpl": "zero"}, {"mlp": "zzz"})},
    "lesion": {
        "of": ("hands", 7, []), "metric": ("x", 7), "edit": ("x", 7), "method": ("x", 7),
        "batch": NO_COUNT, "prompts": (None, 7, []), "tokens": ("x", 1.5),
    },
    "patch": {
        "of": ("hands", 7, []), "per": ("x", 7), "batch": NO_COUNT, "answer": (None,),
        "clean": (None, 7),
    },
    "steer": {
        "direction": (None, "x", torch.ones(3)), "place": ("L99", 7), "prompt": (None, 7),
        "max_new_tokens": NO_COUNT, "random": NO_COUNT, "factor": ("x",),
    },
    "Run": {
        "model": (*NO_MODEL, None), "data": (None,), "autocast": ("bfloat16", 7), "call": (7, "x"),
    },
    "import_hidden_states": {"folder": (7, None, "/no/such/folder")},
    "Inspection.save": {"path": (7, None, "/no/such/folder/x")},
    "Inspection.load": {"path": (7, None, "/no/such/file")},
    "History.save": {"path": (7, None, "/no/such/folder/x")},
    "History.load": {"path": (7, None, "/no/such/file")},
    "load_model": {
        "name": ("tinny", None, 7, "/no/such/folder"), "dtype": ("x", 7), "device": ("x", 3.5),
    },
    "Monitor": {
        "model": (*NO_MODEL, None), "optimizer": ("sgd", 7, [None]),
        "watch": (7, "mpl", []), "what": ("x", 7, [], None), "every": NO_COUNT, "history": NO_COUNT,
        "loss": ("mse", 7, len), "max_bytes": (-1, "x"), "on_nonfinite": ("stop!", 7),
        "incidents": (7, []), "histogram": ("x", 7), "view": (7, []),
    },
    "Monitor.add_writer": {"write": (None, 7, "x")},
    "Monitor.plot": {"field": ("x", 7), "what": ("x", 7)},
    "Monitor.table": {"step": (99, "x", None, 1.5)},
    "Monitor.export": {"path": (7, None, "x.docx", "/no/such/folder/x.csv", *NO_PATH)},
    "History": {"length": NO_COUNT, "with_histograms": (-1, "x", None, 1.5)},
    "History[]": {"position": (99, "x", None, 1.5)},
    "History.scalar": {"name": (7, None)},
    "History.values": {"layer": NO_LAYER, "what": ("x", 7, None), "field": ("x", 7, None)},
    "History.matrix": {"what": ("x", 7, None), "field": ("x", 7, None)},
    "History.statistics": {"layer": NO_LAYER, "what": ("x", 7), "step": (99, "x", None)},
    "History.update_ratio": {"parameter": ("x", 7, None)},
    "History.export": {"path": (7, None, "x.docx")},
    "Incidents": {
        "folder": (7, [], __file__, f"{__file__}/x", *NO_PATH), "steps": (0, -1, "x", 1.5, None),
        "most": (-1, "x", 1.5, None),
    },
    "diagnose": {
        "model": (*NO_MODEL, None, WITHOUT_VALUES), "optimizer": ("sgd", 7, None),
        "steps": NO_COUNT, "batches": (None, 7, [], [torch.ones(2, 4, device="meta")]),
        "loss": ("mse", 7), "step": ("x", 7),
    },
    "calculate_statistics": {"tensor": (None, "x", [1.0], 7), "mask": (torch.ones(2),)},
    "calculate_channel_statistics": {
        "tensor": (None, "x", 7), "axis": (5, -9, "x", None, 1.5), "mask": (torch.ones(7),),
    },
    "merge_statistics": {"parts": (None, 7, [7], ["x", "y"])},
    "Statistics[]": {"key": ("x", 7, None)},
    "Statistics.quantile": {"q": (-0.1, 1.1, "x", None, NAN)},
    "Statistics.linear_histogram": {"bins": (0, -1, "x", 1.5), "range": (7, (1,), (2, 1), "ab")},
    "Statistics.merge": {"other": (None, 7, "x")},
    "Statistics.from_dict": {"data": (None, 7, {}, {"count": "x"})},
    "explain": {"exception": ("x", 7), "model": NO_MODEL},
    "explained": {"model": NO_MODEL},
    "scan": {
        "model": (*NO_MODEL, None), "tokenizer": (None, 7, "gpt2"),
        "prompt": (None, 7, "", [], {}, [[]], [None], b"x", [1.5]),
        "max_new_tokens": (-1, 1.5, "x", None, True), "per": ("token", 7),
        "layers": (*NO_PATTERN, "mpl", None), "voxel": NO_COUNT, "loss": ("mean", 7),
        "tensors": (7, [], "mpl"), "chat": (True, "x", 7), "seed": ("x", 1.5, 2**70),
        "on_token": (7, "x"), "decode": (7, "x"), "live": ("x", None, 7), "verify": ("x", None),
        "attention": (7, "mpl"), "lens": ("x", 1), "experts": ("x",),
        "features": (7, {"mpl": print}),
    },
    "Scan.widget": {"height": (10, "x", None)},
    "view": {
        "what": (7, None), "other": (7, []), "browser": ("x", None), "host": (7, "0.0.0.0"),
        "port": (-1, "x", 70_000), "token": ("short", 7), "remote": ("x",), "state": (7, "x"),
    },
    "stream": {"prompt": (None, 7), "on_token": (print,), "max_new_tokens": (-1, "x")},
    "scan_dataset": {
        "model": ("tiny", None), "dataset": (None, 7, [], {}, "no.jsonl", [7]),
        "out": (None, 7, __file__, *NO_PATH), "max_new_tokens": (-1, "x"), "options": (7, {}, "x"),
        "batch": NO_COUNT, "seed": ("x", 1.5), "field": (7, []), "condition_field": (7, None),
        "on_row": (7, "x"), "per": (None,), "strict": ("x", None, 7), "chat": ("x", 7),
    },
    "lens": {
        "model": (*NO_MODEL, None), "prompt": (None, 7, [], ["a", "b"]), "top": NO_COUNT,
        "translate": (7, "x"), "chat": ("x", 7),
    },
    "attribute_logit": {
        "model": ("tiny", None), "prompt": (None, ["a", "b"]),
        "token": (1.5, 10**9, -1, "two words"), "against": ([], 10**9, ""),
        "position": (99, -99, 1.5, "x", None), "heads": ("x", 7),
    },
    "attribute_inputs": {
        "model": ("tiny", None), "prompt": (None, ["a", "b"]), "token": (1.5, 10**9, "two words"),
        "against": ([], 10**9), "position": (99, "x"), "method": ("shap", 7, None),
        "steps": NO_COUNT, "baseline": ("two words", 10**9, 1.5), "chat": ("x", 7),
    },
    "Scan.attention": {"score": ("sharpness", 7), "sequence": (9, "x")},
    "Scan.plot_attention": {"layer": ("mpl",)},
    "ScanOptions": {
        "per": ("token", 7), "voxel": NO_COUNT, "live": ("x", None), "verify": ("x", 1),
        "layers": (7, [], None), "tensors": (7, []), "attention": (7, [], None),
        "lens": ("x", 1, None), "experts": ("x", 1), "feature_count": NO_COUNT,
    },
    "Scanner": {"model": ("tiny", None), "options": (7, {}, "x")},
    "Scanner.scan": {
        "names": ("x", [], ["a", "b"], 7, [7]), "conditions": ("x", [], 7, [7]),
        "generate": (7, "x", [1]),
    },
    "Scan[]": {"index": (3, "x", None, 1.5)},
    "contrast": {**COMPARED, "a": (7, None, []), "names": (7, ("n", "n"), ["n"])},
    "Scan.contrast": {**COMPARED, "a": ("x", 7, "x - z"), "by": (7, "none"), "paired": (7, "none")},
    "Scan.to_dataframe": {"by": ("x", 7)},
    "Scan.values": {
        "metric": ("x", 7, None), "by": ("x", 7, None), "pattern": (7, "mpl", None),
        "sequence": NO_SEQUENCE,
    },
    "Scan.delta_sc": {"by": ("x", 7), "pattern": (7, "mpl"), "sequence": NO_SEQUENCE},
    "Scan.statistics": {"layer": NO_LAYER, "sequence": (3, "x")},
    "Scan.plot_brain": {
        "metric": ("x", 7), "normalise": ("x", 7), "by": ("x", 7), "order": ("x", 7),
        "layers": (7, "mpl"), "sequence": NO_SEQUENCE, "ax": (7, "x"),
    },
    "Scan.plot_layers": {"metric": ("x", 7), "layers": (7, "mpl"), "sequence": NO_SEQUENCE},
    "Scan.plot_token": {"index": (99, "x", None), "metric": ("x", 7), "sequence": NO_SEQUENCE},
    "Scan.plot_voxels": {"layer": NO_LAYER, "metric": ("x", 7), "normalise": ("x", 7)},
    "Scan.draw": {"path": (7, ".", "x.docx", *NO_PATH), "sequence": NO_SEQUENCE},
    "Scan.save_html": {
        "path": (7, None, ".", *NO_PATH), "sequence": NO_SEQUENCE, "layers": (7, "mpl"),
    },
    "Scan.save": {"path": (7, None, "/", __file__, f"{__file__}/x.fmri", *NO_PATH)},
    "Scan.export": {"path": (7, None, "/", "x.foo", f"{__file__}/x.zarr", *NO_PATH)},
    "load": {"path": (7, None, "/", ".", __file__, *NO_PATH)},
    "generate": {
        "num_beams": (0, "x"), "top_k": ("x", -1), "top_p": ("x", -0.1), "repetition_penalty": (0,),
        "no_repeat_ngram_size": ("x",), "eos_token_id": ("x",), "pad_token_id": ("x",),
        "bad_words_ids": (7, [[]], [["x"]]), "suppress_tokens": ("x",), "logits_processor": ("x",),
        "stopping_criteria": (7,), "generation_config": (7, {}), "max_time": ("x",),
        "stop_strings": (7,), "num_retrun_sequences": (2,), "cache_implementation": ("x",),
        "past_key_values": (7,), "streamer": (7,), "assistant_model": (7,), "min_p": (3,),
    },
    "Anatomy": {
        "layers": ((), ("a",), ("a", "a"), (1, 2), None, "ab"), "types": ((), ("x",), None, (1, 2)),
        "layer": (np.array([0, 5]), np.array([1, 0]), [0, 1], None, np.array([0.0, 1.0])),
        "start": (np.array([-1, 0]), np.zeros(3), "x"), "count": (np.array([0, 1]), np.ones(1)),
        "kind": (np.array([9, 0]), None, "xy"),
    },
    "Anatomy.of_widths": {
        "layers": (["a"], 7), "types": (["x"], 7), "widths": ([4], ["x", 4], [4, -1], 7),
        "sizes": ([2], [0, 2], ["x", 2], 7), "kinds": (["x", "x"], ["units"], 7),
        "experts": ([1], ["x", 1], 7),
    },
    "Anatomy.column": {"layer": NO_LAYER},
    "token_gradients": {
        "pattern": (7, [], "mpl"), "per": ("token", 7, None),
        "keep": ("all", 7), "max_bytes": (-1, "x", None, 1.5), "voxel": NO_COUNT,
    },
    "TokenGradients[]": {"name": ("mlp.wieght", 7, None)},
    "TokenGradients.norm": {"pattern": ("mpl", 7, None)},
    "TokenGradients.on": {"axis": ("x", 7, None)},
    "TokenGradients.select": {"pattern": ("mpl", 7, None)},
    "TokenGradients.project": {"k": NO_COUNT, "seed": ("x", 1.5, None), "pattern": ("mpl",)},
    "TokenGradients.dot": {"direction": (None, 7, {}, {"x": torch.ones(1)}, {"mlp.weight": 7})},
    "TokenGradient.norm": {"by": ("x", 7)},
    "TokenGradient.dot": {"direction": (None, 7, torch.ones(3), "x")},
    "TokenGradient.sum": {"mask": (7, "x", torch.ones(5, 5))},
    "TokenGradient.topk": {"k": NO_COUNT},
    "TokenGradient.project": {"k": NO_COUNT, "seed": ("x", 1.5)},
    "TokenGradient[]": {"where": (7, (9, 9), "x", None, (0,))},
    "TokenGradient.materialise": {"max_bytes": (1, -1, "x", None)},
    "TokenLossGradients[]": {"name": ("mlp.wieght", 7)},
    "TokenLossGradients.project": {"k": (0, "x"), "seed": ("x",)},
    "TokenLossGradient.dot": {"direction": (7, torch.ones(3), "x")},
    "token_loss_dots": {
        "model": NO_MODEL, "losses_of": (None, 7, "x", lambda model: 7),
        "direction": (None, 7, {}, [], {"x": torch.ones(1)}, {"mlp.weight": torch.ones(2)}),
    },
    "token_losses": {
        "logits": (torch.ones(3),), "labels": (torch.ones(9, dtype=torch.long),),
        "reduction": ("x", 7, None), "ignore_index": ("x", None, 1.5), "shift": ("x", 7),
    },
    "verify_gradients": {
        "model": (WITHOUT_VALUES, *NO_MODEL, None), "layers": (7, [], "mpl"),
        "expected": (7, "mpl"), "directions": NO_COUNT, "loss": ("mean", 7), "second": ("x", 7),
    },
    "Verification.layers": {},
    "cost": {
        "model": (WITHOUT_VALUES, *NO_MODEL, None), "loss": ("mean", 7), "rounds": NO_COUNT[1:],
        "sizes": (7, "x", {"x": [1]}, {"batch": 7}, {"batch": []}, {"batch": [0]}, {"batch": "x"}),
    },
    "Cost[]": {"layer": NO_LAYER},
    "Growth.predict": {"batch": NO_COUNT[:4], "length": (0, "x")},
    "advise": {
        "model": (WITHOUT_VALUES, *NO_MODEL, None), "loss": ("mean", 7), "rounds": NO_COUNT,
        "combine": (-1, "x", 1.5), "max_deviation": (-1, "x"), "progress": (7, "x"),
    },
    "reference.linear": {
        "x": (None, 7, torch.ones(2, 5)), "weight": (None, torch.ones(3), torch.ones(4, 9)),
        "bias": (7, torch.ones(9)),
    },
    "reference.attention": {
        "query": (None, torch.ones(3), torch.ones(1, 2, 3, 9)),
        "key": (None, torch.ones(1, 2, 9, 4)), "value": (None, torch.ones(1, 2, 9, 4)),
        "mask": (7, torch.ones(9, 9)), "scale": ("x",),
    },
    "reference.light_attention": {
        "query": (None, torch.ones(3)), "block": NO_COUNT, "scale": ("x",),
    },
    "SparseProtoLinear": {"in_features": NO_COUNT, "out_features": NO_COUNT},
    "MoIETransformerBlock": {"hidden_size": (*NO_COUNT, 7), "heads": (*NO_COUNT, 3)},
    "RoutingConfig": {
        "vocab_size": NO_COUNT, "hidden_size": NO_COUNT, "blocks": NO_COUNT,
        "heads": (*NO_COUNT, 3),
    },
    "RoutingLanguageModel": {"config": (None, 7, {"vocab_size": 3})},
    "RoutingLanguageModel.generate": {
        "input_ids": (None, [1], torch.ones(3), torch.ones(2, 3), torch.tensor([[99]])),
        "max_new_tokens": (-1, "x", 1.5, None), "temperature": (0, -1, "x"), "top_k": (0, "x"),
    },
    "LearningDynamics": {
        "model": (None, 7, nn.Linear(1, 1)), "optimizer": (None, "sgd"),
        "meta_optimizer": (7, None),
        "signal": ("x", 7), "mode": ("x", 7), "accumulation_steps": NO_COUNT, "meta_loss": (7, "x"),
        "history_every": (-1, "x", 1.5),
    },
    "Divergence": {"goodness": (7, "worth"), "over": ("x", 7), "weight": ("x", NAN, None)},
    "Price": {"weight": ("x", NAN, None)},
    "UnitRates": {"model": (None, 7), "tasks": NO_COUNT},
    "map_prototypes": {"model": (None, 7), "goodness": (7, "x")},
    "computation_parameters": {"model": (None, 7, "x")},
    "routing_parameters": {"model": (None, 7, "x")},
    "routing.plot_activation": {"histories": (None, 7, {})},
    "routing.plot_tradeoff": {"points": (None, 7, {})},
    "TensorBoardWriter": {"fields": (["x"], 7, []), "writer": (None, 7)},
    "WandbWriter": {"fields": (["x"], 7, []), "run": (7,)},
}  # fmt: skip


class BadCall(NamedTuple):
    """A call, the argument that is wrong, and what it is given."""

    call: str
    argument: str
    value: Any

    def __str__(self) -> str:
        value = getattr(self.value, "__name__", None) or repr(self.value)
        return f"{self.call}({self.argument}={' '.join(value.split())[:30]})"


def bad_calls() -> Iterator[BadCall]:
    for call, arguments in BAD.items():
        for argument, values in arguments.items():
            for value in values:
                yield BadCall(call, argument, value)
