"""The verbs of target banks: targets import, capture, verify and vocab, and export."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from arrowbank.cli.options import Common, DryRun, Out, Restart
from arrowbank.cli.show import finish, progress_for, show_checks, show_estimate, unfinished
from arrowbank.settings import EXECUTION, Count, Help, Part

if TYPE_CHECKING:
    from arrowbank import CaptureConfig, ExportConfig, ImportConfig, ModelConfig, RunOptions


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="DUMP", help="A dump, or files of vLLM, SpecForge, Model-Optimizer, speculators or DeepSpec."),
    ],
    out: Out,
    config: ImportConfig,
    options: RunOptions,
    common: Common,
    to: Annotated[Literal["deepspec"], Help("Write this cache to --out, and no bank.")] | None = None,
    dry_run: DryRun = False,
) -> None:
    """Turn hidden states that are stored somewhere already into a target bank, or straight into a DeepSpec cache.

    Example: arrowbank targets import dump --target-model Qwen/Qwen3-8B --layers 1,17,32 --out targets
    """
    from arrowbank.targets.importer import estimate_import, import_targets, import_to_deepspec

    progress = progress_for(common.json)
    if dry_run:
        show_estimate(estimate_import(config, source, out, options=options, progress=progress), common.json)
    elif to:
        cache = import_to_deepspec(config, source, out, options=options, progress=progress)
        finish(common.json, cache, f"{out}: {cache['num_samples']:,} samples in {cache['num_shards']} shards.")
    else:
        manifest = import_targets(config, source, out, options=options, progress=progress)
        finish(common.json, manifest, _made(out, manifest["counts"]) if manifest["complete"] else unfinished(out, manifest))


def capture(
    out: Out,
    config: CaptureConfig,
    options: RunOptions,
    common: Common,
    dry_run: DryRun = False,
    print_serve_command: Annotated[bool, Help("Print how to start a server for --vllm-url."), EXECUTION] = False,
) -> None:
    """Run a model over conversations or token rows and keep the hidden states of some layers. The same command again goes on.

    Example: arrowbank targets capture --model Qwen/Qwen3-8B --source chats.jsonl --layers 1,17,32 --out targets
    """
    from arrowbank.inputs.sources import named_source
    from arrowbank.targets.capture import capture as run
    from arrowbank.targets.capture import capture_serve_command, estimate_capture

    if print_serve_command:
        command = capture_serve_command(config, out)
        finish(common.json, {"command": command}, command)
        return
    name, place = named_source(str(config.data))
    if place != str(config.data):
        config = replace(config, data=place, source_name=name)
    progress = progress_for(common.json)
    if dry_run:
        show_estimate(estimate_capture(config, out, options=options, progress=progress), common.json)
        return
    manifest = run(config, out, options=options, progress=progress)
    finish(common.json, manifest, _made(out, manifest["counts"]) if manifest["complete"] else unfinished(out, manifest))


def export(
    bank: Annotated[str, typer.Argument(metavar="BANK", help="A bank's folder.")],
    config: ExportConfig,
    out: Annotated[str, Help("A new folder.", "DIR")],
    common: Common,
    restart: Restart = False,
) -> None:
    """Write a bank in the format that a trainer reads; refused where it would be mislabelled.

    Example: arrowbank export targets --to deepspec --out cache
    """
    from arrowbank.formats.registry import export as run

    manifest = run(config, bank, out, restart=restart, progress=progress_for(common.json))
    finish(common.json, manifest, f"{out}: complete, as {config.format}.\nVerify it: arrowbank verify {shlex.quote(out)}")


def verify(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A target bank, or a DeepSpec cache.")],
    common: Common,
    model: Annotated[
        ModelConfig | None,
        Part(
            without=("pooling", "layer", "backbone"),
            help={"model": Help("The target model: proves layers and norm by computing again.", "M")},
        ),
    ] = None,
    samples: Annotated[str, Help("How many samples the model computes again.", "N|all", default="59")] | None = None,
) -> None:
    """Prove hidden states: bytes, ids, masks, values; with --model that they are of the layers and norm they are labelled with.

    Example: arrowbank targets verify targets --model Qwen/Qwen3-8B
    """
    from arrowbank.targets.check_model import verify_targets

    show_checks(verify_targets(folder, model, samples=count_or_all(samples), progress=progress_for(common.json)), common.json)


def count_or_all(samples: str | None) -> int | str | None:
    """A number of samples as it is typed."""
    return int(samples) if samples is not None and samples.isdecimal() else samples


def vocab(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A target bank.")],
    draft_vocab: Annotated[Count, Help("Tokens of the draft's vocabulary.")],
    common: Common,
    vocab_size: Annotated[Count, Help("The target's, where the bank does not say it.")] | None = None,
    out: Annotated[str, Help("Default: vocab-N.safetensors in the bank.", "FILE")] | None = None,
) -> None:
    """Map a draft's smaller vocabulary onto the target's: d2t and t2d, by how often tokens count in the loss.

    Example: arrowbank targets vocab targets --draft-vocab 32000
    """
    from arrowbank.targets.vocab import map_path, write_vocab_map

    made = write_vocab_map(folder, draft_vocab, vocab_size=vocab_size, out=out, progress=progress_for(common.json))
    path = str(out or map_path(folder, draft_vocab))
    facts = {"file": path, "draft_vocab_size": len(made.d2t), "target_vocab_size": len(made.t2d), "coverage": made.coverage}
    finish(
        common.json, facts, f"{path}: {len(made.d2t):,} of {len(made.t2d):,} tokens, {made.coverage:.2%} of the loss tokens."
    )


def _made(out: str, counts: dict[str, Any]) -> str:
    left_out = "".join(f", {count:,} left out ({why.replace('_', ' ')})" for why, count in counts["dropped"].items() if count)
    return (
        f"{out}: {counts['kept']:,} samples, {counts['tokens']:,} tokens, {counts['loss_tokens']:,} in the loss{left_out}.\n"
        f"Prove it: arrowbank targets verify {out} --model M. Next: arrowbank export {out} --to FORMAT --out DIR"
    )
